"""Sharded state dicts of modules, with Megatron Core's keys.

A module returns the entries of its own parameters and of its children, which may have a
``sharded_state_dict`` of their own.  How a parameter is sharded stands in its record (`ParamInfo`);
user code may say it too.  ``sharded_offsets``: (axis, index, number) of the axes along which layers
and experts are stacked.  A replica id is (copy of a shared embedding, rank among tensor-parallel
copies, rank among data-parallel copies).  ``metadata`` selects among keys of Megatron Core:
``singleton_local_shards`` gives layers, experts and the halves of a gated MLP keys of their own.
Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.config.value_types import Shape
from megatron.core.dist_checkpointing.key_names import HALVES, block_names, is_vocabulary
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    split_factory,
)
from megatron.core.parallel.default_groups import default_groups
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, info_of, local_part

Offsets = Iterable[tuple[int, int, int]]
Metadata = Mapping[str, Any] | None
_GROUPS = "pg_collection"  # entry of ``metadata`` that a module with groups adds for its children


class ShardedModule(nn.Module):
    """A module whose state dict can be saved in one layout and loaded in another."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return an entry for each tensor of ``state_dict(prefix=prefix)``, under its name there.

        The ``key`` of an entry is its name in a checkpoint of Megatron Core, the same in every
        layout.
        """
        groups = vars(self).get(_GROUPS)
        if groups is not None and _GROUPS not in (metadata or {}):
            metadata = {**(metadata or {}), _GROUPS: groups}
        return _entries(self, prefix, sharded_offsets, metadata)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # State dicts of Megatron Core have the state of Transformer Engine's modules, or None.
        if type(self).set_extra_state is nn.Module.set_extra_state:
            state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def sharded_state_dict_default(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: Metadata = None,
    *,
    tp_group: ProcessGroup | None = None,
) -> ShardedStateDict:
    """Return the module's ``sharded_state_dict``, or its entries if it has no such method.

    ``tp_group`` has no effect: the records of the parameters have it.
    """
    del tp_group
    if (own := getattr(module, "sharded_state_dict", None)) is not None:
        found: ShardedStateDict = own(
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )
        return found
    return _entries(module, prefix, sharded_offsets, metadata)


def _entries(
    module: nn.Module, prefix: str, offsets: Offsets, metadata: Metadata
) -> ShardedStateDict:
    own: dict[str, Tensor] = {}
    module._save_to_state_dict(own, "", keep_vars=True)
    entries = {
        prefix + name: _entry(value, prefix + name, offsets, metadata)
        for name, value in own.items()
    }
    for name, child in module.named_children():
        entries |= sharded_state_dict_default(child, f"{prefix}{name}.", offsets, metadata)
    return entries


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Offsets = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
) -> ShardedStateDict:
    """Return the entries of the tensors and extra states of one module.

    ``tensor_parallel_layers_axis_map``: the axis along which tensor parallelism shards a tensor; of
    others their record says it.
    """
    axes = tensor_parallel_layers_axis_map or {}
    groups: dict[str, Any] = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    entries: ShardedStateDict = {}
    for name, value in state_dict.items():
        key = prefix + name
        if name.endswith(extra_state_suffix):
            entries[key] = make_sharded_object_for_checkpoint(value, key, sharded_offsets, **groups)
        elif name in axes:
            entries[key] = make_tp_sharded_tensor_for_checkpoint(
                value, key, axes[name], None, sharded_offsets, **groups
            )
        else:
            entries[key] = _entry(value, key, sharded_offsets, groups)
    return entries


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    **kwargs: Any,
) -> ShardedTensor:
    """Return the entry of a tensor that tensor parallelism shards along ``tp_axis``.

    ``kwargs``: the groups, ``tp_group`` and ``dp_cp_group``, and fields of the entry.
    """
    group = kwargs.get("tp_group") or default_groups().tp
    info = replace(
        info_of(tensor), shard_dim=tp_axis, shard_index=group.rank(), shard_count=group.size()
    )
    return _sharded_tensor(tensor, key, info, prepend_offsets, replica_id, **kwargs)


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """Return the entry of a tensor that every tensor-parallel rank holds completely.

    ``kwargs``: the groups, ``tp_group`` and ``dp_cp_group``, and fields of the entry.
    """
    info = replace(info_of(tensor), shard_dim=None)
    return _sharded_tensor(tensor, key, info, prepend_offsets, replica_id, **kwargs)


def make_sharded_object_for_checkpoint(
    obj: object,
    key: str,
    sharded_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    **groups: Any,
) -> ShardedObject:
    """Return the entry of an object that is the same on all ranks but for ``sharded_offsets``."""
    if replica_id is None:
        replica_id = _replica_id(ParamInfo(global_shape=()), groups)
    return ShardedObject(key, obj, *extra_state_offsets(sharded_offsets), replica_id)


def extra_state_offsets(sharded_offsets: Offsets) -> tuple[Shape, Shape]:
    """Return global shape and offset of a `ShardedObject` at these offsets."""
    ordered = sorted(sharded_offsets) or [(0, 0, 1)]
    axes, offset, shape = (tuple(column) for column in zip(*ordered, strict=True))
    assert axes == tuple(range(len(axes))), f"offsets of other axes than the first: {ordered}"
    return shape, offset


def ensure_metadata_has_dp_cp_group(metadata: Metadata) -> dict[str, Any]:
    """Return ``metadata`` with the group of data- and context-parallel ranks."""
    return {"dp_cp_group": default_groups().dp_cp, **(metadata or {})}


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedBase,
    sharded_offsets: Offsets = (),
    singleton_local_shards: bool = False,
) -> ShardedBase:
    """Return a factory that shards gate and up projection of a gated MLP separately."""
    del sharded_offsets  # the entry has them
    if not isinstance(original_sh_ten, ShardedTensor):
        return original_sh_ten  # its record has said that it has two halves
    half = original_sh_ten.local_shape[0] // 2
    factory = split_factory(original_sh_ten, [half, half], ())
    if singleton_local_shards:
        named = split_factory(original_sh_ten, [half, half], HALVES, separator="")
        factory = replace(factory, build_fn=named.build_fn)
    return factory


def _entry(value: Any, key: str, offsets: Offsets, metadata: Metadata) -> ShardedBase:
    """Return the entry of a tensor as its record describes it, or of an extra state."""
    metadata = metadata or {}
    if not isinstance(value, Tensor) or key.endswith("_extra_state"):
        return make_sharded_object_for_checkpoint(value, key, offsets, **metadata)
    info = info_of(value)
    tensor = _sharded_tensor(value, key, info, offsets, _replica_id(info, metadata))
    if info.blocks == (1, 1):
        return apply_swiglu_sharded_factory(
            tensor, offsets, bool(metadata.get("singleton_local_shards"))
        )
    if len(info.blocks) == 1:
        return tensor
    rows = tensor.local_shape[info.shard_dim or 0]
    sizes = [rows * block // sum(info.blocks) for block in info.blocks]
    return split_factory(tensor, sizes, block_names(key, len(sizes)), info.shard_dim or 0)


def _replica_id(info: ParamInfo, metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    groups: ProcessGroupCollection = metadata.get(_GROUPS) or default_groups()
    copy = 0
    if info.counts_once_per_tp_group and not info.is_duplicate:
        tp = metadata.get("tp_group") or (groups.expt_tp if info.is_expert else groups.tp)
        copy = tp.rank()
    if info.part is not None:
        return int(info.is_duplicate), copy, info.part.copy
    dp = groups.expt_dp if info.is_expert else metadata.get("dp_cp_group") or groups.dp_cp
    return int(info.is_duplicate), copy, dp.rank()


def _sharded_tensor(
    tensor: Tensor,
    key: str,
    info: ParamInfo,
    offsets: Offsets,
    replica_id: ReplicaId | None,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    **fields: Any,
) -> ShardedTensor:
    lead = tuple(offsets)
    places = lead
    if info.shard_dim is not None:
        places = (*lead, (len(lead) + info.shard_dim, info.shard_index, info.shard_count))
    if replica_id is None:
        replica_id = _replica_id(info, {"tp_group": tp_group, "dp_cp_group": dp_cp_group})
    fields = {
        "replica_id": replica_id,
        "prepend_axis_num": len(lead),
        "allow_shape_mismatch": is_vocabulary(key),
        **fields,
    }
    part = info.part
    if part is None:
        return ShardedTensor.from_rank_offsets(key, tensor, *places, **fields)
    flat = local_part(tensor).reshape(-1)
    elements = slice(part.start, part.start + flat.numel())
    return ShardedTensor.from_rank_offsets_flat(
        key, flat, part.shape, *places, flattened_range=elements, **fields
    )
