"""Copy tensors to host memory that is allocated once and reused by later saves.

The memory is page-locked if the tensors are on a GPU, for copies at full bus speed.
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


class HostBuffer:
    """Host memory for one snapshot at a time; it grows to the largest size requested."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> Tensor:
        """Return at least ``num_bytes`` of memory; this invalidates an earlier snapshot."""
        if self._memory.numel() < num_bytes:
            self._memory = device.host_memory(num_bytes)
        return self._memory


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
    places = iter(torch.split(buffer.reserve(sum(sizes))[: sum(sizes)], sizes))
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
