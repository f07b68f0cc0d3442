"""Describe a tensor by few numbers that do not depend on how ranks share it.

The sketch of a tensor is its norm and its sums under random signs.  For two tensors, the mean
square of the differences of these sums estimates the square of the norm of their difference.  The
sums of the parts of a tensor add up to those of the tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

SIGNS = 8  # sums of a sketch: the estimate has the true size within a factor of 2
_CHUNK = 2**20  # values whose signs are in memory at the same time


def sums_under_signs(
    name: str, values: Tensor, offset: Sequence[int] = (), shape: Sequence[int] = ()
) -> list[float]:
    """Return the sums of ``values`` under the random signs of ``name``.

    ``offset``: the place of ``values`` in a tensor of ``shape``; default: they are complete.
    """
    place = torch.zeros((), dtype=torch.int64, device=values.device)
    for dim, size in enumerate(values.shape):
        first = offset[dim] if offset else 0
        places = torch.arange(first, first + size, device=values.device)
        place = place.unsqueeze(-1) * (shape[dim] if shape else size) + places
    total = torch.zeros(SIGNS, dtype=torch.float64, device=values.device)
    chunks = values.flatten().split(_CHUNK), place.flatten().split(_CHUNK)
    for chunk, places in zip(*chunks, strict=True):
        # An integer hash of the place: no generator, whose numbers may be others in another release
        mixed = (places + (zlib.crc32(name.encode()) << 24)) * 0x9E3779B97F4A7C1
        mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
        mixed ^= mixed >> 32
        signs = [1 - 2 * (mixed >> bit & 1) for bit in range(SIGNS)]
        total += torch.stack([(chunk.double() * sign).sum() for sign in signs])
    return [float(each) for each in total]
