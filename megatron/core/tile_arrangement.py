"""Arrange the embeddings of an image's tiles as LLaVA-NeXT does: row by row over all tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NEWLINE = -1  # in an order: the learned embedding at the end of a row


@dataclass(frozen=True)
class TileArrangement:
    """Tiles of one image: the complete image, then ``rows`` x ``columns`` tiles of it.

    The image of ``height`` x ``width`` pixels was scaled to fit the grid and padded evenly.  A tile
    has ``side`` x ``side`` embeddings.
    """

    rows: int
    columns: int
    height: int
    width: int
    side: int

    @property
    def num_tiles(self) -> int:
        """Number of tiles, with that of the complete image."""
        return 1 + self.rows * self.columns

    @cached_property
    def order(self) -> Tensor:
        """Indices of the embeddings that stand for the image, on the CPU: int64 [count].

        They count the embeddings of all tiles, or are `NEWLINE`.  First comes the complete image,
        then each row of embeddings of the grid, without those of padding.
        """
        of_tile = self.side * self.side
        tiles = torch.arange(of_tile, self.num_tiles * of_tile)
        tiles = tiles.view(self.rows, self.columns, self.side, self.side)
        grid = tiles.transpose(1, 2).reshape(self.rows * self.side, self.columns * self.side)
        ended = torch.nn.functional.pad(self._without_padding(grid), (0, 1), value=NEWLINE)
        return torch.cat([torch.arange(of_tile), ended.flatten()])

    def _without_padding(self, grid: Tensor) -> Tensor:
        rows, columns = grid.shape
        if self.width / self.height > columns / rows:  # the image is wider than the grid
            kept = int(round(self.height * (columns / self.width), 7))
            padding = (rows - kept) // 2
            return grid[padding : rows - padding]
        kept = int(round(self.width * (rows / self.height), 7))
        padding = (columns - kept) // 2
        return grid[:, padding : columns - padding]
