"""Run a function on virtual ranks: in threads, each with a default process group of its own.

torch.distributed, the environment and `rank_local` variables have the values that they would have
if the rank were a process.  The ranks share everything else of the process: standard output, signal
handlers, the number of threads per operation, and global variables of scripts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed import distributed_c10d

from megatron.core import rank_local
from megatron.core.config.errors import ConfigError
from megatron.core.virtual_ranks import BACKEND, transport
from megatron.core.virtual_ranks.cooperative_scheduler import (
    Baton,
    random_states,
    set_random_states,
)

T = TypeVar("T")
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TORCH = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_group_count",
    "_tags_to_pg",
    "_pg_to_tag",
    "_backend",
    "_default_pg_init_method",
)


def run(fn: Callable[..., T], world_size: int, *args: object) -> list[T | None]:
    """Run ``fn(rank, world_size, *args)`` on every rank; return the results in rank order.

    The result of a rank that has called ``sys.exit(0)`` is None.

    Rank 0 runs in the calling thread.  If a rank raises, the other ranks end at their next wait,
    and this function raises the exception; DeadlockError reports what each rank waits for.  Raises
    ConfigError if torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"{world_size} virtual ranks: torch.distributed is initialized already; start them "
            "first, in a process that no launcher started"
        )
    results: dict[int, T] = {}
    baton = Baton(world_size)

    def live(rank: int) -> None:
        with contextlib.ExitStack() as life:
            life.push(baton.end)
            baton.begin(rank)
            with _default_group(rank, world_size, store):
                results[rank] = fn(rank, world_size, *args)

    with _shared_process(world_size), transport.network_of(baton):
        store = dist.HashStore()
        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(1, world_size)
        ]
        for thread in threads:
            thread.start()
        live(0)
        for thread in threads:
            thread.join()
    if baton.failure is not None:
        rank, error = baton.failure
        print(f"virtual rank {rank} failed: {type(error).__name__}: {error}", file=sys.stderr)
        raise error
    return [results.get(rank) for rank in range(world_size)]


@contextlib.contextmanager
def without_groups() -> Iterator[None]:
    """Hide the process groups of torch.distributed inside the context, and restore them after."""
    world = distributed_c10d._world
    places = [
        *((distributed_c10d, name) for name in _TORCH),
        *((world, name) for name in vars(world)),
    ]
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), value in zip(places, before, strict=True):
        setattr(owner, name, type(value)() if isinstance(value, dict | list | int) else None)
    _set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        for (owner, name), value in zip(places, before, strict=True):
            setattr(owner, name, value)


@contextlib.contextmanager
def _default_group(rank: int, world_size: int, store: dist.Store) -> Iterator[None]:
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    try:
        # Run backward in the rank's own thread: autograd's device threads serve all ranks.
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _shared_process(world_size: int) -> Iterator[None]:
    """Set the process-wide state that virtual ranks need, and restore it at the end.

    That is: torch's tables of process groups, random states, environment and exception hook.
    """
    world = distributed_c10d._world
    rank_local.each_rank_owns(distributed_c10d, *_TORCH)
    rank_local.each_rank_owns(world, *vars(world))
    before, randomness, hook = rank_local.take(), random_states(), sys.excepthook
    launch = {name: os.environ.get(name) for name in _LAUNCH}
    os.environ.update(dict(zip(_LAUNCH, ("0", "0", str(world_size), str(world_size)), strict=True)))
    rank_local.put({})
    _set_thread_isolation_mode(True)  # torch's C++ registry of group names becomes thread-local
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        rank_local.put(before)
        set_random_states(randomness)
        sys.excepthook = hook
        for name, value in launch.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
