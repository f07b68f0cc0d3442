"""Entries of a sharded state dict that are no tensors, with Megatron-LM's constructors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron.core.dist_checkpointing.value_types import Nested

ReplicaId = int | tuple[int, ...]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this is the replica that is saved: 0, or zeros."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


@dataclass
class ShardedObject:
    """A value of which each rank has its own, at ``global_offset`` in an array of such values."""

    key: str
    data: Nested
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    @property
    def unique_key(self) -> str:
        """The key with the place, which names the value in the checkpoint."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"


@dataclass
class ShardedTensorFactory:
    """A tensor that is saved in other pieces than it lies in memory.

    ``build_fn(key, data, replica_id, flattened_range)`` returns the sharded state dict that is
    saved and loaded; ``merge_fn`` makes the value again of what was loaded for it.
    """

    key: str
    data: Tensor
    build_fn: Callable[[str, Tensor, ReplicaId, slice | None], Nested]
    merge_fn: Callable[[Nested], Nested]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Nested:
        """The sharded state dict in place of this entry."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


class LocalNonpersistentObject:
    """A value that is not saved; `load` returns it as it is."""

    def __init__(self, obj: object) -> None:
        self.obj = obj

    def unwrap(self) -> object:
        """The value itself."""
        return self.obj
