"""Neighbouring embeddings of an image, merged."""

from __future__ import annotations

import math

from torch import Tensor

from megatron.core.config.errors import ConfigError


def pixel_shuffle(x: Tensor, scale_factor: float = 0.5, version: int = 2) -> Tensor:
    """Merge squares of embeddings into the channels of one: [b, n, c] -> [b, n/k^2, k^2 c].

    k is 1 / ``scale_factor``; the n embeddings of an image are a square, row by row.  Version 1
    leaves rows and columns exchanged, as the first InternVL models expect it.

    Raises ConfigError if the embeddings are no square of whole squares.
    """
    side, k = math.isqrt(x.shape[1]), round(1 / scale_factor)
    if side * side != x.shape[1] or side % k:
        raise ConfigError(
            f"{x.shape[1]} embeddings of an image cannot be merged {k} by {k}: a square of a "
            f"multiple of {k} rows is needed, without class tokens"
        )
    squares = x.unflatten(1, (side // k, k, side // k, k)).transpose(2, 3)
    if version == 1:
        squares = squares.transpose(1, 2)
    merged: Tensor = squares.flatten(3).flatten(1, 2)
    return merged
