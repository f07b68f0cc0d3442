"""Fixed communication buffers for FSDP2, in place of one allocation per collective.

FSDP2 gathers a unit into a staging buffer and copies the parameters out of it; it copies gradients
into another staging buffer and reduce-scatters them from it.  Two such buffers are in use at a
time: that of the unit that computes, and that of the unit whose collective overlaps with it.  So
layers of equal size alternate between two buffers, whose addresses never change: memory does not
fragment, and NCCL registers them once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocMixin,
)

_BUFFERS = 2
Size = Sequence[int | torch.SymInt]  # FSDP2's type; the sizes passed to this file are integers


class DoubleBuffers:
    """At most two buffers for each size and dtype, allocated at their first use and never freed.

    A buffer is free when no tensor but the one in this object refers to its storage.  FSDP2 drops
    its tensor only after the streams that allocate have waited for the copies out of it.
    """

    def __init__(self, allocate: Callable[..., Tensor] = torch.empty) -> None:
        self._allocate = allocate
        self._kept: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of ``size`` in a free buffer; in new memory if both are in use."""
        numel = prod(map(int, size))
        buffers = self._kept.setdefault((numel, dtype, device), [])
        for place, buffer in enumerate(buffers):
            if _references(buffer) == _references_of_new():
                buffers.append(buffers.pop(place))  # the least recently used one comes first
                return buffer.view(*size)
        buffer = self._allocate((numel,), dtype=dtype, device=device)
        if len(buffers) < _BUFFERS:
            buffers.append(buffer)
        return buffer.view(*size)


class RegisteredMemory(ProcessGroupAllocMixin):
    """Allocator of memory registered with the group's NCCL; ordinary memory on other backends."""


class BufferedAllGather(DefaultAllGather):
    """All-gather of FSDP2 into a fixed buffer."""

    def __init__(self, buffers: DoubleBuffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._buffers.take(size, dtype=dtype, device=device)


class BufferedReduceScatter(DefaultReduceScatter):
    """Reduce-scatter of FSDP2 out of a fixed buffer.

    FSDP2 calls `allocate` for the input, then for the output, which becomes the gradient and so
    needs memory of its own, and then calls this object.
    """

    def __init__(self, buffers: DoubleBuffers) -> None:
        self._buffers = buffers
        self._has_input = False

    def allocate(self, size: Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._has_input:
            return super().allocate(size, dtype=dtype, device=device)
        self._has_input = True
        return self._buffers.take(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: ReduceOp | ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work:
        self._has_input = False
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def _references(buffer: Tensor) -> int:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)


def _references_of_new() -> int:
    """Return the result of `_references` for a tensor whose storage no other tensor uses."""
    return _references(torch.empty(0))
