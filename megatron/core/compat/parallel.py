"""Megatron Core's helpers around process groups: rank order, NCCL options, memory buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from megatron.core import device
from megatron.core.parallel.communicators import CommunicatorSettings, resolve_settings
from megatron.core.parallel.process_groups_config import get_installed
from megatron.core.parallel.rank_grid import RankGrid
from megatron.core.rank_local import each_rank_owns

_AXES = ("tp", "pp", "dp", "ep", "cp")


class RankGenerator:
    """Ranks of the groups of a layout; ``order`` names the axes, fastest first.

    >>> RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="tp-dp").get_ranks("dp")
    [[0, 2], [1, 3]]
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str, rank_offset: int = 0
    ) -> None:
        assert ep == 1 or cp == 1, f"ep is {ep} and cp is {cp}: one of them must be 1"
        self.tp = tp
        self.ep = ep
        self.dp = dp
        self.pp = pp
        self.cp = cp
        self.rank_offset = rank_offset
        self.name_to_size = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp}
        self.world_size = prod(self.name_to_size.values())
        given = order.lower().split("-")
        for name, size in self.name_to_size.items():
            if name not in given and size != 1:
                raise RuntimeError(f"The size of ({name}) is ({size}), but the order is ({order})")
        axes = [*given, *(name for name in _AXES if name not in given)]
        self.order = "-".join(axes)
        self.ordered_size = [self.name_to_size[name] for name in axes]
        self._grid = RankGrid(dict(zip(axes, self.ordered_size, strict=True)), rank_offset)

    def get_mask(self, order: str, token: str) -> list[bool]:
        """Return which axes of ``order`` are in ``token``; both are joined by hyphens."""
        return [name in token.split("-") for name in order.split("-")]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the ranks of each group over the axes of ``token``, such as ``tp-dp``."""
        return self._grid.groups(*token.split("-"))


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the ranks of each group over the axes in ``mask``; the first axis is the fastest."""
    sizes = {str(axis): size for axis, size in enumerate(parallel_size)}
    groups = RankGrid(sizes).groups(*(str(axis) for axis, is_in in enumerate(mask) if is_in))
    return groups[: world_size // len(groups[0])]


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Create a process group, as ``torch.distributed.new_group``.  Collective over all ranks."""
    group: ProcessGroup = dist.new_group(
        ranks, timeout, backend, pg_options, use_local_synchronization, group_desc
    )
    return group


def get_nccl_options(
    pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]
) -> dist.ProcessGroupNCCL.Options | None:
    """Return the NCCL options of group ``pg_name``, None without an entry.

    Raises RuntimeError for a value that NCCL does not accept.
    """
    if pg_name not in nccl_comm_cfgs:
        return None
    try:
        settings, _ = resolve_settings({"tp": nccl_comm_cfgs[pg_name]})
    except ValueError as error:
        raise RuntimeError(str(error).replace("group tp", f"group {pg_name}")) from error
    return settings.get("tp", CommunicatorSettings()).torch_options(None)


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Set the timeout of ``pg``, or of the default group and all installed groups."""
    groups = [pg] if pg else [dist.group.WORLD, *vars(get_installed() or object).values()]
    for group in groups:
        if isinstance(group, ProcessGroup) and group in distributed_c10d._world.pg_map:
            distributed_c10d._set_pg_timeout(timeout, group)


class GlobalMemoryBuffer:
    """Buffers that are allocated once and used for different tensors, one for each name."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
    ) -> Tensor:
        """Return a tensor in the buffer ``name``, with the values of its last use.

        ``mem_alloc_context`` returns a context for an allocation.
        """
        size = prod(tensor_shape)
        buffer = self.buffer.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with (mem_alloc_context or contextlib.nullcontext)():
                buffer = torch.empty(size, dtype=dtype, device=device.current())
            self.buffer[name, dtype] = buffer
        return buffer[:size].view(*tensor_shape)


_memory_buffers: list[GlobalMemoryBuffer] = []
each_rank_owns(__name__, "_memory_buffers")


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the buffers of this rank."""
    if not _memory_buffers:
        _memory_buffers.append(GlobalMemoryBuffer())
    return _memory_buffers[0]


def destroy_global_memory_buffer() -> None:
    """Free the buffers of this rank."""
    _memory_buffers.clear()


def set_global_memory_buffer() -> None:
    """Create new buffers for this rank."""
    _memory_buffers[:] = [GlobalMemoryBuffer()]
