"""Sharded state dicts of optimizers, from the entries of the model's parameters.

The entry of a state of a parameter has the parameter's sharding and the key
``optimizer.state.{kind}.{key of the parameter}``.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.value_types import StateDict
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    leaves,
)
from megatron.core.params.param_info import FlatPart, local_part

Entry = ShardedTensor | ShardedTensorFactory


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: ShardedStateDict, optim_params_iter: Iterable[Tensor]
) -> dict[int, Entry]:
    """Return the model's entries by the numbers of the optimizer's parameters.

    The entries are found by the memory of the parameters; of tied ones the first.
    """
    entries: dict[int, Entry] = {}
    for entry in leaves(model_sharded_state_dict):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
            entries.setdefault(entry.data.data_ptr(), entry)
    found = {}
    for number, param in enumerate(optim_params_iter):
        address = local_part(param).data_ptr()
        if address in entries:
            found[number] = entries.pop(address)
    return found


def make_sharded_optimizer_tensor(
    model_param: Entry, optim_param: Tensor, prefix: str, part: FlatPart | None = None
) -> Entry:
    """Return the entry of a state that is sharded as its parameter is.

    ``part``: the range of the flattened parameter that ``optim_param`` belongs to, if the
    data-parallel ranks divide it.
    """
    changes: dict[str, Any] = {"key": f"{prefix}.{model_param.key}"}
    data = local_part(optim_param)
    if part is not None and model_param.flattened_range is None:
        assert isinstance(model_param.replica_id, tuple), "(pipeline, tensor, data) replica"
        changes["flattened_range"] = slice(part.start, part.start + optim_param.numel())
        changes["replica_id"] = (*model_param.replica_id[:2], part.copy)
    if isinstance(model_param, ShardedTensor):
        changes["dtype"] = optim_param.dtype
    is_flat = part is not None or model_param.flattened_range is not None
    return replace(model_param, data=data.reshape(-1) if is_flat else data, **changes)


def optim_state_to_sharding_state(
    optim_state_dict: StateDict,
    id_to_sharded_param_map: Mapping[int, Entry],
    exclude_keys: Collection[str] = (),
    *,
    parts: Mapping[int, FlatPart | None] | None = None,
) -> None:
    """Replace the tensors of a torch.optim state dict by their entries, in place.

    ``parts``: see `make_sharded_optimizer_tensor`.

    Raises ValueError for a parameter that the model does not have.
    """
    sharded: dict[int, dict[str, object]] = {}
    for number, state in optim_state_dict["state"].items():
        kinds = [kind for kind in state if kind not in exclude_keys]
        if kinds and number not in id_to_sharded_param_map:
            raise ValueError(f"parameter {number} of the optimizer is none of the model")
        sharded[number] = {
            kind: make_sharded_optimizer_tensor(
                id_to_sharded_param_map[number],
                state[kind],
                f"optimizer.state.{kind}",
                (parts or {}).get(number),
            )
            if isinstance(state[kind], torch.Tensor)
            else state[kind]
            for kind in kinds
        }
    groups = copy.deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict |= {"state": sharded, "param_groups": groups}
