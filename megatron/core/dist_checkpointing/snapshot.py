"""Copy tensors to host memory that is allocated once and reused by later saves.

The memory is page-locked if the tensors are on a GPU, for copies at full bus speed.  torch rounds
the size of page-locked memory up to a power of two: so it is allocated in blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.dist_checkpointing.mapping import Piece, ShardedTensor

_ALIGNMENT = 64
_BLOCK_BYTES = 2**30


class HostBuffer:
    """Host memory for one snapshot at a time; it grows to the largest size requested."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def reserve(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return memory of each of ``sizes`` in bytes; this invalidates an earlier snapshot.

        A block holds several of them up to 1 GiB, or a larger one alone.
        """
        filled: list[int] = []  # bytes used in each block
        places = []
        for size in sizes:
            fits = (i for i, used in enumerate(filled) if used + size <= _BLOCK_BYTES)
            block = next(fits, len(filled))
            if block == len(filled):
                filled.append(0)
            places.append((block, filled[block]))
            filled[block] += size
        for i, used in enumerate(filled):
            if i == len(self._blocks):
                self._blocks.append(device.host_memory(used))
            elif self._blocks[i].numel() < used:
                self._blocks[i] = torch.empty(0)  # free it before the larger one is allocated
                self._blocks[i] = device.host_memory(used)
        return [
            self._blocks[block][start : start + size]
            for (block, start), size in zip(places, sizes, strict=True)
        ]


@torch.no_grad()
def copy_out(tensors: Sequence[ShardedTensor], buffer: HostBuffer) -> list[ShardedTensor]:
    """Return the same records with copies in ``buffer``, in the dtype of the file.

    Blocks until the copies are complete.
    """
    sizes = [
        -(-prod(piece.shape) * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        for tensor in tensors
        for piece in tensor.pieces
    ]
    places = iter(buffer.reserve(sizes))
    copies: list[ShardedTensor] = []
    for tensor in tensors:
        pieces = [
            Piece(piece.offset, _copy(piece.data, tensor.dtype, next(places)))
            for piece in tensor.pieces
        ]
        copies.append(replace(tensor, pieces=tuple(pieces)))
    device.finish_stream()
    return copies


def _copy(data: Tensor, dtype: torch.dtype, place: Tensor) -> Tensor:
    num_bytes = data.numel() * dtype.itemsize
    copied = place[:num_bytes].view(dtype).view(data.shape)
    return copied.copy_(data, non_blocking=True)
