"""A 64-bit hash of tensors that does not depend on how they are sharded.

Each element is mixed with its index in the global tensor and with the tensor's key, and the results
are added modulo 2**64.  Shards can therefore be hashed on their ranks, in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.value_types import Shape
from megatron.core.dist_checkpointing.records import LazyPiece, Piece, TensorRecord

# Odd 64-bit constants, written as signed integers because torch.int64 is signed.
_OF_VALUE = -0x61C8864680B583EB
_OF_PLACE = -0x3D4D51C2D82B14B1
_MIX = -0x40A7B892E31B1A47
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 20  # elements per chunk; each needs 8 bytes of temporary memory


@torch.no_grad()
def hash_here(tensor: TensorRecord) -> Tensor:
    """Hash this rank's part of ``tensor``; return an int64 scalar on the device of the run."""
    key = zlib.crc32(tensor.key.encode()) << 32
    total = torch.zeros((), dtype=torch.int64, device=device.current())
    for piece in tensor.pieces:
        for place, values in _blocks(piece, tensor.global_shape):
            total += _mix(values.to(tensor.dtype), place + key)
    return total


def hash_of_all(tensors: Iterable[TensorRecord], group: ProcessGroup) -> int:
    """Hash tensors from the parts on all ranks; return an int below 2**64.

    Collective over ``group``: an all-reduce of the sums.  ``tensors`` are those that this rank
    would write (`to_write`), so that every element counts once.
    """
    total = torch.zeros((), dtype=torch.int64, device=device.current())
    for tensor in tensors:
        total += hash_here(tensor)
    dist.all_reduce(total, group=group)
    return int(total) % 2**64


def _blocks(piece: Piece | LazyPiece, whole: Shape) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield chunks of a piece along its first dimension: global element indices, values."""
    values = piece.data
    offset = piece.offset
    if not whole:
        values = values.reshape(1)
        offset = (0,)
        whole = (1,)
    rows = max(1, _BLOCK // max(1, prod(values.shape[1:])))
    first, *others = (
        (torch.arange(size, device=values.device) + begin) * prod(whole[dim + 1 :])
        for dim, (size, begin) in enumerate(zip(values.shape, offset, strict=True))
    )
    inner = torch.zeros((), dtype=torch.int64, device=values.device)
    for places in others:
        inner = inner.unsqueeze(-1) + places
    for part, places in zip(values.split(rows), first.split(rows), strict=True):
        yield places.view(-1, *[1] * len(others)) + inner, part


def _mix(values: Tensor, places: Tensor) -> Tensor:
    """Return the sum over the elements of a mix of the bits of value and index."""
    bits = values.contiguous().view(_BITS[values.dtype.itemsize]).to(torch.int64)
    mixed = bits * _OF_VALUE + places * _OF_PLACE
    for _ in range(2):  # each half of the bits must affect the other half
        mixed = (mixed ^ (mixed >> 32)) * _MIX
    return (mixed ^ (mixed >> 29)).sum().to(device.current())
