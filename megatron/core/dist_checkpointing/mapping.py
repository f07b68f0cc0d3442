"""Entries of sharded state dicts, with Megatron Core's classes.

A sharded state dict is a tree of dicts and lists.  `ShardedTensor` is what this rank holds of a
tensor, `ShardedObject` of a value that differs between ranks; `ShardedTensorFactory` makes several
entries of one tensor.  User code builds, changes and copies them; `ShardedTensor.record` returns
what a save writes and a load fills.  Nothing in this module communicates.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Nested, Shape, StateDict
from megatron.core.dist_checkpointing.records import Piece, Replica, TensorRecord
from megatron.core.params.param_info import flat_boxes

ReplicaId = int | Shape
ShardedStateDict = dict[str, Any]  # nested, with entries of this module
CommonStateDict = StateDict
Entry = TypeVar("Entry", bound="ShardedBase")


class ShardedBase(ABC):
    """Base class of entries; ``data`` may be None where only the description matters."""

    key: str
    data: object
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointError if the fields contradict each other."""

    def without_data(self: Entry) -> Entry:
        """Return a copy whose ``data`` is None."""
        entry = copy.copy(self)
        entry.data = None
        return entry


@dataclass
class ShardedTensor(ShardedBase):
    """The part ``data`` of a tensor of ``global_shape``: a box, or a range of a flattened box.

    The box has ``local_shape`` and begins at ``global_offset``; its axes follow
    ``prepend_axis_num`` axes of size 1, along which layers or experts are stacked.  All ranks
    together split axis i into ``axis_fragmentations[i]`` boxes.  With ``flattened_range``, ``data``
    has these elements of the flattened box.  ``allow_shape_mismatch``: the stored shape may differ
    (vocabulary padding).  Only the main replica is saved: ``replica_id`` is 0 or all zeros.
    """

    key: str
    data: Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: Shape
    global_shape: Shape
    global_offset: Shape
    axis_fragmentations: Shape | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointError if the fields contradict each other."""
        part = self.flattened_range
        lead = self.prepend_axis_num
        own = self.global_offset[lead:]
        if len(self.global_shape) != len(self.global_offset):
            problem = "global_shape and global_offset have different lengths"
        elif len(self.local_shape) + lead != len(self.global_shape):
            problem = "local_shape and prepend_axis_num do not make up the axes of global_shape"
        elif any(n and at % n for at, n in zip(own, self.local_shape, strict=True)):
            problem = "global_offset is not a multiple of local_shape"
        elif part is not None and part.step is not None:
            problem = "flattened_range has a step"
        elif self.data is None:
            return
        elif self.data.dtype != self.dtype:
            problem = f"data has dtype {self.data.dtype}"
        elif self.data.shape != self._data_shape():
            problem = f"data has shape {list(self.data.shape)}, not {list(self._data_shape())}"
        else:
            return
        raise CheckpointError(f"{self.key}: {problem}: {self}")

    def _data_shape(self) -> Shape:
        if self.flattened_range is None:
            return tuple(self.local_shape)
        return (len(range(*self.flattened_range.indices(prod(self.local_shape)))),)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Return the entry of ``data``, a shard of a tensor that is split evenly along some axes.

        ``rank_offsets``: (axis, index of this shard, number of shards); axis numbers include the
        ``prepend_axis_num`` axes added before those of ``data``.
        """
        if flattened_range is not None:
            raise ValueError(f"{key}: from_rank_offsets_flat makes entries with a flattened_range")
        local = [1] * prepend_axis_num + list(data.shape)
        shape = list(local)
        offset = [0] * len(local)
        counts = [1] * len(local)
        for axis, part, count in rank_offsets:
            if not (0 <= axis < len(local) and 0 <= part < count):
                raise CheckpointError(
                    f"{key}: part {part} of {count} along axis {axis} is not a part of a tensor "
                    f"with {len(local)} axes"
                )
            shape[axis] = count * local[axis]
            offset[axis] = part * local[axis]
            counts[axis] = count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(shape),
            tuple(offset),
            tuple(counts),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: Tensor,
        non_flat_local_shape: Shape,
        *args: tuple[int, int, int],
        flattened_range: slice | None = None,
        **kwargs: Any,
    ) -> ShardedTensor:
        """Return the entry of ``data``, the elements ``flattened_range`` of a flattened shard."""
        if flattened_range is None:
            raise CheckpointError(f"{key}: from_rank_offsets_flat needs a flattened_range")
        whole = torch.empty(*non_flat_local_shape, dtype=data.dtype, device="meta")
        entry = cls.from_rank_offsets(key, whole, *args, **kwargs)
        return replace(entry, data=data, flattened_range=flattened_range)

    def init_data(
        self, device: str | torch.device, init_fn: Callable[..., Tensor] = torch.empty
    ) -> None:
        """Create ``data`` if there is none."""
        if self.data is None:
            self.data = init_fn(self._data_shape(), dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Return rows ``start`` to ``start + length`` along ``dim`` of each rank's box.

        The result has one entry, or none if the flattened range has none of these rows.  ``dim``
        does not count prepended axes; it is 0 for a flattened range.
        """
        at = dim + self.prepend_axis_num
        size = self.local_shape[dim]

        def change(shape: Shape, axis: int, value: int) -> Shape:
            return (*shape[:axis], value, *shape[axis + 1 :])

        local = change(tuple(self.local_shape), dim, length)
        data = self.data
        part = self.flattened_range
        if part is None:
            data = None if data is None else data.narrow(dim, start, length)
        elif dim:
            raise CheckpointError(f"{self.key}: a flattened range is narrowed along axis 0 only")
        else:
            row = prod(local[1:])
            low = max(part.start, start * row)
            high = min(part.stop, (start + length) * row)
            if low >= high:
                return []
            data = None if data is None else data[low - part.start : high - part.start]
            part = slice(low - start * row, high - start * row)
        narrowed = replace(
            self,
            data=data,
            local_shape=local,
            global_shape=change(self.global_shape, at, self.global_shape[at] * length // size),
            global_offset=change(self.global_offset, at, self.global_offset[at] * length // size),
            flattened_range=part,
        )
        return [narrowed]

    def record(self) -> TensorRecord:
        """Return what a save writes and a load fills: views of ``data``."""
        if self.data is None:
            raise CheckpointError(f"{self.key}: it has no data: {self}")
        lead = self.prepend_axis_num
        part = self.flattened_range
        data = self.data.detach()
        pieces = []
        if part is None:
            pieces.append(Piece(self.global_offset, data[(None,) * lead]))
        for at, shape in (
            () if part is None else flat_boxes(self.local_shape, part.start, part.stop)
        ):
            view = data[: prod(shape)].view((1,) * lead + shape)
            data = data[prod(shape) :]
            offset = map(sum, zip(self.global_offset, (0,) * lead + at, strict=True))
            pieces.append(Piece(tuple(offset), view))
        own = enumerate((self.axis_fragmentations or ())[lead:])
        cuts = [(dim, count) for dim, count in own if count > 1] or [(0, 1)]
        return TensorRecord(
            key=self.key,
            global_shape=tuple(self.global_shape),
            dtype=self.dtype,
            pieces=tuple(pieces),
            replica=Replica() if is_main_replica(self.replica_id) else None,
            sharding=cuts[0],
            is_flat=part is not None and len(cuts) == 1 and len(self.global_shape) > 1,
            stacked=tuple(self.global_shape[:lead]),
            may_differ=self.allow_shape_mismatch,
        )


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether this replica is the one to save: its id is 0 or all zeros."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


@dataclass
class ShardedObject(ShardedBase):
    """A value that differs between ranks: element ``global_offset`` of an array of such values."""

    key: str
    data: Nested
    global_shape: Shape
    global_offset: Shape
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointError if the fields contradict each other."""
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointError(
                f"{self.key}: global_shape and global_offset have different lengths: {self}"
            )

    @property
    def unique_key(self) -> str:
        """Key of the value in the checkpoint: ``key`` with offset and shape."""
        offset = ".".join(map(str, self.global_offset))
        shape = ".".join(map(str, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the entry, without data, whose `unique_key` this is."""
        key, _, place = unique_key.rpartition("/shard_")
        offset, shape = (tuple(map(int, text.split("."))) for text in place.split("_"))
        return cls(key, None, shape, offset, replica_id)


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is saved as other tensors than the one in memory.

    ``build_fn(key, data, replica_id, flattened_range)`` returns the sharded state dict to save and
    load; ``merge_fn`` rebuilds the value from the loaded state dict.
    """

    key: str
    data: Tensor | None
    build_fn: Callable[[str, Tensor, ReplicaId, slice | None], Nested]
    merge_fn: Callable[[Nested], Nested]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Nested:
        """Return the sharded state dict that replaces this entry."""
        assert self.data is not None, "a factory divides values"
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: there is nothing to contradict."""


class LocalNonpersistentObject:
    """A value that is not saved; `load` returns it unchanged."""

    def __init__(self, obj: object) -> None:
        self.obj = obj

    def unwrap(self) -> object:
        """Return the value."""
        return self.obj


def split_factory(
    tensor: ShardedTensor,
    sizes: Sequence[int],
    names: Sequence[str],
    dim: int = 0,
    *,
    separator: str = ".",
) -> ShardedTensorFactory:
    """Return a factory that saves consecutive rows of each rank's box as tensors of their own.

    ``sizes``: rows of this rank in each of them; ``names`` follow the key and ``separator``.
    Without names the parts, equally many rows each, stay one tensor: the rows of all ranks of the
    first part come before those of the second.  So each matrix is sharded separately in a tensor
    that concatenates several.
    """
    form = tensor.without_data()
    at = dim + tensor.prepend_axis_num
    if sum(sizes) != tensor.local_shape[dim]:
        raise ValueError(f"{tensor.key}: parts of {list(sizes)} rows do not make up {form}")

    def build(key: str, data: Tensor, replica_id: ReplicaId, part: slice | None) -> Nested:
        whole = replace(
            form,
            key=key,
            data=data,
            dtype=data.dtype,
            replica_id=replica_id,
            flattened_range=part,
        )
        entries = []
        start = 0
        for number, size in enumerate(sizes):
            for entry in whole.narrow(dim, start, size):
                if names:
                    entry.key = f"{key}{separator}{names[number]}"
                else:
                    counts = list(whole.axis_fragmentations or ())
                    offset = [*entry.global_offset]
                    offset[at] += number * entry.global_shape[at]
                    counts[at] *= len(sizes)
                    entry.global_shape = whole.global_shape
                    entry.global_offset = tuple(offset)
                    entry.axis_fragmentations = tuple(counts)
                entries.append(entry)
            start += size
        return entries

    def merge(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts), dim if parts[0].dim() > dim else 0)

    return ShardedTensorFactory(
        tensor.key, tensor.data, build, merge, tensor.replica_id, tensor.flattened_range
    )


def leaves(x: Nested) -> Iterator[Any]:
    """Yield the values of nested dicts and lists that are neither dict nor list."""
    if isinstance(x, dict | list):
        for value in x.values() if isinstance(x, dict) else x:
            yield from leaves(value)
    else:
        yield x


def map_leaves(f: Callable[[Any], Any], x: Nested) -> Nested:
    """Return a copy of nested dicts and lists with ``f`` of each other value."""
    if isinstance(x, dict):
        return {key: map_leaves(f, value) for key, value in x.items()}
    return [map_leaves(f, value) for value in x] if isinstance(x, list) else f(x)


def apply_prefix_mapping(
    sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]
) -> None:
    """Replace in each entry's key the first prefix of ``prefix_map`` that it begins with."""
    for entry in leaves(sharded_state_dict):
        if isinstance(entry, ShardedBase):
            for old, new in prefix_map.items():
                if entry.key.startswith(old):
                    entry.key = new + entry.key.removeprefix(old)
                    break


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the prefix of all keys.  Raises ValueError for a key without it."""
    for entry in leaves(sharded_state_dict):
        if isinstance(entry, ShardedBase) and not entry.key.startswith(old_prefix):
            raise ValueError(f"key {entry.key} does not begin with {old_prefix}")
    apply_prefix_mapping(sharded_state_dict, {old_prefix: new_prefix})


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Prepend ``prefix`` to all keys."""
    apply_prefix_mapping(sharded_state_dict, {"": prefix})
