"""Names of Megatron Core's checkpoint packages that have another form here.

A strategy says which format `save` writes; how ranks share the work is decided by the library.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.config.value_types import Nested, StateDict
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.async_requests import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.manifest import FORMAT
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.process_memory import resident_and_peak

async_calls = AsyncCallsQueue()
NO_RESULTS = None  # Megatron Core's queue between the processes of a save

# ---- strategies ----------------------------------------------------------------------------


class SaveShardedStrategy:
    """Selects the format that `dist_checkpointing.save` writes: ``torch_dist``, or our own."""

    def __init__(self, backend: str = "torch_dist", version: int = 1) -> None:
        self.backend = backend
        self.version = version
        serialization.format_name(self)


class TorchDistSaveShardedStrategy(SaveShardedStrategy):
    """The same.  Options of Megatron Core's writer have no effect."""

    def __init__(
        self,
        backend: str = "torch_dist",
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        del keep_only_main_replica, thread_count, cached_metadata, separation_hint
        super().__init__(backend, version)


class LoadShardedStrategy:
    """Makes `dist_checkpointing.load` read any format: the folder tells which it has."""

    backend = FORMAT


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """The same; Megatron Core's name of the strategy for torch_dist."""


class FullyParallelSaveStrategyWrapper(SaveShardedStrategy):
    """The wrapped strategy: main replicas write, whatever the group is."""

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
    ) -> None:
        del parallelization_group, do_cache_distribution
        super().__init__(strategy.backend, strategy.version)


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """The wrapped strategy: each rank reads what it needs, whatever the group is."""

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        del strategy, parallelization_group, do_cache_distribution, exchange_algo


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> SaveShardedStrategy:
    """Return the strategy that writes a format.  Raises CheckpointError for an unknown one."""
    return TorchDistSaveShardedStrategy(backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """Return the strategy that reads a folder.  Raises CheckpointError if it has no checkpoint."""
    if not Path(checkpoint_dir).is_dir():
        raise CheckpointError(f"Checkpoint directory {checkpoint_dir} does not exist")
    if not serialization.check_is_distributed_checkpoint(checkpoint_dir):
        raise CheckpointError(f"{checkpoint_dir} is not a distributed checkpoint")
    return TorchDistLoadShardedStrategy()


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | Path, sharded_strategy: Any = None, common_strategy: Any = None
) -> tuple[LoadShardedStrategy, LoadShardedStrategy]:
    """Return `get_default_load_sharded_strategy` for both arguments, which have no effect."""
    del sharded_strategy, common_strategy
    strategy = get_default_load_sharded_strategy(checkpoint_dir)
    return strategy, strategy


def get_async_strategy(async_strategy: str = "mcore", module: str | None = None) -> Any:
    """Return the queue and the request of asynchronous saves; there is one implementation."""
    names = {"AsyncCallsQueue": AsyncCallsQueue, "AsyncRequest": AsyncRequest}
    return async_strategy, names if module is None else names[module]


class TensorStoreLoadShardedStrategy:
    """Raises ConfigError: format zarr is not read."""

    def __init__(self, load_directly_on_device: bool = False) -> None:
        raise ConfigError(
            "checkpoints of format zarr are not read: convert them to torch_dist with Megatron Core"
        )


class FileSystemWriterAsync:
    """Raises ConfigError: functions, not a class, write the files of a checkpoint."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ConfigError(
            "FileSystemWriterAsync is not available: dist_checkpointing.save with "
            "async_sharded_save=True writes in the background"
        )


@contextmanager
def disable_gc() -> Iterator[None]:
    """Suspend garbage collections within the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def process_memory() -> int:
    """Return the bytes of host memory that this process uses."""
    return resident_and_peak()[0]


def clean_metadata_for_serialization(metadata: StateDict) -> StateDict:
    """Return ``metadata`` without process groups, which are not saved."""
    return {k: v for k, v in metadata.items() if not hasattr(v, "rank")}


# ---- nested dicts and lists ----------------------------------------------------------------


def dict_list_map_inplace(f: Callable[[Any], Any], x: Nested) -> Nested:
    """Replace each value of nested dicts and lists by ``f`` of it."""
    if isinstance(x, dict):
        x.update({key: dict_list_map_inplace(f, value) for key, value in x.items()})
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


def extract_matching_values(
    x: Nested, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Nested, Nested]:
    """Divide nested dicts and lists into two: with the values that match, and with the others.

    Lists keep their order only, or with ``return_lists_as_dicts`` become dicts by index.
    """
    is_list = isinstance(x, list)
    if not is_list and not isinstance(x, dict):
        raise ValueError(f"Unexpected top-level object type: {type(x)}")
    both: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
    for key, value in enumerate(x) if is_list else x.items():
        if isinstance(value, dict | list):
            parts = extract_matching_values(value, predicate, return_lists_as_dicts)
            for own, part in zip(both, parts, strict=True):
                if part or (own is both[1] and not value):
                    own[key] = part
        else:
            both[0 if predicate(value) else 1][key] = value
    if is_list and not return_lists_as_dicts:
        return list(both[0].values()), list(both[1].values())
    return both


def diff(
    x1: Nested, x2: Nested, prefix: tuple[Any, ...] = ()
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return paths that only one of two trees has, and (path, type, type) of different values."""
    only_left: list[Any] = []
    only_right: list[Any] = []
    mismatch: list[Any] = []
    if isinstance(x1, dict) and isinstance(x2, dict):
        only_left = [(*prefix, key) for key in x1.keys() - x2.keys()]
        only_right = [(*prefix, key) for key in x2.keys() - x1.keys()]
        pairs = [(key, x1[key], x2[key]) for key in x1 if key in x2]
    elif isinstance(x1, list | tuple) and type(x1) is type(x2):
        only_left = [(*prefix, i) for i in range(len(x2), len(x1))]
        only_right = [(*prefix, i) for i in range(len(x1), len(x2))]
        pairs = list(zip(count(), x1, x2, strict=False))
    else:
        if isinstance(x1, ShardedTensorFactory | LocalNonpersistentObject):
            is_same = type(x1) is type(x2)
        elif isinstance(x1, ShardedTensor) and isinstance(x2, ShardedTensor):
            return diff(_fields(x1), _fields(x2), prefix)
        elif isinstance(x1, Tensor) and isinstance(x2, Tensor):
            is_same = x1.shape == x2.shape and bool(torch.all(x1 == x2))
        else:
            is_same = bool(x1 == x2)
        return [], [], [] if is_same else [(prefix, type(x1), type(x2))]
    for key, left, right in pairs:
        for found, more in zip(
            (only_left, only_right, mismatch), diff(left, right, (*prefix, key)), strict=True
        ):
            found.extend(more)
    return only_left, only_right, mismatch


def _fields(entry: ShardedTensor) -> dict[str, Any]:
    return {"data": entry.data, "description": repr(entry.without_data())}
