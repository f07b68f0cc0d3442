"""Allocate device memory with NCCL's allocator and register it with process groups.

For --use-nccl-ub.  NCCL reads and writes registered buffers in place; it copies other buffers
through its own.  The memory of a pool is registered with each group after the allocations, so every
rank of the groups must enter the same allocation contexts in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError

_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "0"}


def init() -> None:
    """Set NCCL's environment variables; call it before the first communicator is created.

    Raises ConfigError if torch's allocator uses expandable segments, which NCCL cannot register.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            raise ConfigError(
                f"--use-nccl-ub: {name} has expandable_segments:True, and NCCL cannot register "
                "expandable segments; set expandable_segments:False"
            )
    os.environ.update(_ENVIRONMENT)


def create_nccl_mem_pool(symmetric: bool | None = None) -> device.MemPool:
    """Return a pool of memory that NCCL allocates, for the device of this process.

    Needs an initialized default group.  Raises ConfigError for ``symmetric``.
    """
    if symmetric:
        raise ConfigError("create_nccl_mem_pool(symmetric=True): symmetric memory is not supported")
    group = dist.group.WORLD
    assert group is not None, "init_process_group comes before create_nccl_mem_pool"
    return device.memory_pool(_backend(group).mem_allocator)


class MultiGroupMemPoolAllocator:
    """Context that allocates from ``pool`` and registers it with ``groups`` on exit.

    Collective over each of ``groups``.
    """

    def __init__(self, pool: device.MemPool, groups: Iterable[ProcessGroup]) -> None:
        self.pool = pool
        self.groups = list(dict.fromkeys(groups))

    def __enter__(self) -> None:
        self._allocation = device.allocating_from(self.pool)
        self._allocation.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._allocation.__exit__(*error)
        for group in self.groups:
            # Registration needs the communicator, which the first collective creates.
            dist.all_reduce(torch.zeros(1, device=device.current()), group=group)
            _backend(group).register_mem_pool(self.pool)


def registered_memory(groups: Sequence[ProcessGroup]) -> AbstractContextManager[None]:
    """Return a context that allocates memory registered with ``groups``.

    Ordinary memory unless all groups of more than one rank have the NCCL backend.
    """
    wide = [group for group in groups if group.size() > 1]
    if not wide or any(dist.get_backend(group) != dist.Backend.NCCL for group in wide):
        return nullcontext()
    return MultiGroupMemPoolAllocator(create_nccl_mem_pool(), wide)


def _backend(group: ProcessGroup) -> Any:  # ProcessGroupNCCL, a type that only CUDA builds have
    return group._get_backend(device.current())
