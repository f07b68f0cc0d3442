"""Entries of a sharded state dict other than tensors, with Megatron-LM's constructors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron.core.config.value_types import Nested

ReplicaId = int | tuple[int, ...]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether this replica is the one to save: its id is 0 or all zeros."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


@dataclass
class ShardedObject:
    """A value that differs between ranks: element ``global_offset`` of an array of such values."""

    key: str
    data: Nested
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    @property
    def unique_key(self) -> str:
        """Key of the value in the checkpoint: ``key`` with offset and shape."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"


@dataclass
class ShardedTensorFactory:
    """A tensor that is saved as other tensors than those in memory.

    ``build_fn(key, data, replica_id, flattened_range)`` returns the sharded state dict to save and
    load; ``merge_fn`` rebuilds the value from the loaded state dict.
    """

    key: str
    data: Tensor
    build_fn: Callable[[str, Tensor, ReplicaId, slice | None], Nested]
    merge_fn: Callable[[Nested], Nested]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Nested:
        """Return the sharded state dict that replaces this entry."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


class LocalNonpersistentObject:
    """A value that is not saved; `load` returns it unchanged."""

    def __init__(self, obj: object) -> None:
        self.obj = obj

    def unwrap(self) -> object:
        """Return the value."""
        return self.obj
