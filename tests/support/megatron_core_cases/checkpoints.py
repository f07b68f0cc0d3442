"""Checkpoints: keys and shapes, and what a load returns."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from .frame import Values, case, config, fill, gpt, start


@case(2)
def a_checkpoint_of_two_tensor_parallel_ranks() -> Values:
    start(tensor_model_parallel_size=2)
    settings = config(tensor_model_parallel_size=2)
    model, other = gpt(settings), gpt(settings)
    fill(model)
    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(box)
    state = model.sharded_state_dict()
    dist_checkpointing.save({"model": state, "step": 3}, box[0])
    wanted = {"model": other.sharded_state_dict(), "step": None}
    loaded = dist_checkpointing.load(wanted, box[0])
    other.load_state_dict(loaded["model"])
    shapes = {
        key: [entry.key, entry.global_shape, entry.local_shape, entry.global_offset]
        for key, entry in state.items()
        if hasattr(entry, "global_shape") and not key.endswith("_extra_state")
    }
    return {"step": loaded["step"], **shapes, **dict(other.named_parameters())}


@case(2)
def sharded_tensors_by_hand() -> Values:
    start(tensor_model_parallel_size=2)
    rank = dist.get_rank()
    box = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(box)

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        offsets = (0, rank, 2)
        halves = data.chunk(2)
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{n}", half, offsets, replica_id=replica_id)
            for n, half in zip("ab", halves, strict=True)
        ]

    def state(scale: float) -> Any:
        own = torch.arange(8.0).view(4, 2) * scale + rank
        parts = make_sharded_tensors_for_checkpoint(
            {"weight": own, "bias": torch.ones(3) * scale}, "old.", {"weight": 0}
        )
        replace_prefix_for_sharding(parts, "old.", "new.")
        return {
            **parts,
            "stacked": ShardedTensor.from_rank_offsets(
                "stacked", torch.ones(3) * (rank + scale), (0, rank, 2), prepend_axis_num=1
            ),
            "object": ShardedObject("object", {"value": scale + rank}, (2,), (rank,)),
            "factory": ShardedTensorFactory("factory", own, build, torch.cat),
            "local": LocalNonpersistentObject("kept"),
            "plain": scale,
        }

    saved = state(1.0)
    values = {
        key: [e.key, e.global_shape, e.local_shape, e.global_offset, e.axis_fragmentations]
        for key, e in saved.items()
        if isinstance(e, ShardedTensor)
    }
    dist_checkpointing.save(saved, box[0])
    loaded = dist_checkpointing.load(state(0.0), box[0])
    for key, value in loaded.items():
        values[f"loaded {key}"] = value
    return values


@case()
def strictness_of_loads() -> Values:
    start()
    folder = tempfile.mkdtemp()
    make = ShardedTensor.from_rank_offsets
    dist_checkpointing.save({"a": make("a", torch.ones(2)), "b": make("b", torch.ones(2))}, folder)
    values: Values = {}
    for mode in StrictHandling:
        wanted = {"a": make("a", torch.zeros(2)), "c": make("c", torch.zeros(2))}
        if mode.name == "ASSUME_OK_UNEXPECTED":
            continue  # fails inside the format's reader
        try:
            found = dist_checkpointing.load(wanted, folder, strict=mode)
            missing = [sorted(keys) for keys in found[1:]] if isinstance(found, tuple) else None
            values[mode.name] = [sorted(found[0] if missing is not None else found), missing]
        except CheckpointingException:
            values[mode.name] = "refused"
    values["metadata"] = sorted(dist_checkpointing.load_tensors_metadata(folder))
    return values
