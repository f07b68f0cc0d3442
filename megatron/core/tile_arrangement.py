"""Arrange the embeddings of an image in rows with ends: LLaVA-NeXT's tiles, Pixtral's patches.

It imports no torch, as the process that reads prompts does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import numpy as np
import numpy.typing as npt

NEWLINE = -1  # in an order: the embedding at the end of a row
LAST = -2  # in an order: the embedding at the end of the last row, if that is another one


@dataclass(frozen=True)
class EndedRows:
    """Embeddings of one image, row by row; `NEWLINE` ends each row, and `LAST` the last one."""

    rows: int
    columns: int

    @property
    def num_tiles(self) -> int:
        """Number of blocks of patches, each of which has an embedding."""
        return self.rows * self.columns

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """See `TileArrangement.order`."""
        grid = np.arange(self.num_tiles, dtype=np.int64).reshape(self.rows, self.columns)
        order = np.pad(grid, ((0, 0), (0, 1)), constant_values=NEWLINE).ravel()
        order[-1] = LAST
        return order


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

    @classmethod
    def of_size(cls, size: Sequence[int], embeddings_per_tile: int) -> TileArrangement:
        """Return the arrangement for a row of ``image_sizes``: rows, columns, height and width."""
        rows, columns, height, width = size
        return cls(rows, columns, height, width, isqrt(embeddings_per_tile))

    @property
    def num_tiles(self) -> int:
        """Number of tiles, with that of the complete image."""
        return 1 + self.rows * self.columns

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Indices of the embeddings that stand for the image: int64 [count].

        They count the embeddings of all tiles, or are `NEWLINE`.  First comes the complete image,
        then each row of embeddings of the grid, without those of padding.
        """
        of_tile = self.side * self.side
        tiles = np.arange(of_tile, self.num_tiles * of_tile, dtype=np.int64)
        squares = tiles.reshape(self.rows, self.columns, self.side, self.side)
        grid = squares.swapaxes(1, 2).reshape(self.rows * self.side, self.columns * self.side)
        ended = np.pad(self._without_padding(grid), ((0, 0), (0, 1)), constant_values=NEWLINE)
        return np.concatenate([np.arange(of_tile, dtype=np.int64), ended.ravel()])

    def _without_padding(self, grid: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        rows, columns = grid.shape
        if self.width / self.height > columns / rows:  # the image is wider than the grid
            padding = (rows - int(round(self.height * (columns / self.width), 7))) // 2
            return grid[padding : rows - padding]
        padding = (columns - int(round(self.width * (rows / self.height), 7))) // 2
        return grid[:, padding : columns - padding]
