"""Tensors of a run under keys that do not depend on the layout: weights, optimizer state.

The key of a weight is its global name; ``optimizer.state.exp_avg.<name>`` is its first moment.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing import plain_values
from megatron.core.dist_checkpointing.records import (
    OPTIMIZER_PREFIX,
    TensorRecord,
    from_param,
    replica_of,
)
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.param_groups import without_wrappers
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, info_of, local_part
from megatron.core.rerun.state_machine import RerunStateMachine
from megatron.core.tensor_parallel.random import get_rng_tracker

_STATE_PREFIX = f"{OPTIMIZER_PREFIX}state."


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The live objects that a checkpoint is saved from and loaded into."""

    model_chunks: Sequence[nn.Module]
    groups: ProcessGroupCollection
    optimizer: MegatronOptimizer | None = None
    scheduler: OptimizerParamScheduler | None = None
    stages: Sequence[Sequence[int]] = ()  # layers of each virtual stage, for a file per rank
    kind: str | None = None  # --model-kind
    asked: Arguments | None = None  # this run's command line; None: not compared
    rerun: RerunStateMachine | None = None  # whose state is saved and restored
    objective_state: JsonObject | None = None  # see ObjectiveState
    unused: tuple[str, ...] = ()  # prefixes of tensors that only the checkpoint needs to have
    base: Arguments | None = None  # what names the frozen model: only adapters are saved
    started_from: str | None = None  # folder of the weights that the run started from


def model_tensors(parts: RunParts, *, padded: bool = False) -> list[TensorRecord]:
    """Return the records of this rank's weights and persistent buffers.

    With ``padded``, they include the rows of vocabulary padding.  Collective over data-parallel
    ranks: completes pending parameter all-gathers first.
    """
    for chunk in parts.model_chunks:
        if isinstance(chunk, DataParallelBase):
            chunk.finish_param_sync()
    return [
        replace(
            from_param(
                name,
                info,
                local_part(tensor),
                replica_of(info, parts.groups),
                dtype=info.dtype,
                padded=padded,
            ),
            is_constant=isinstance(tensor, nn.Parameter) and not tensor.requires_grad,
            is_buffer=not isinstance(tensor, nn.Parameter),
        )
        for name, info, tensor in _named_tensors(parts.model_chunks)
    ]


def optimizer_tensors(parts: RunParts, *, padded: bool = False) -> list[TensorRecord]:
    """Return the records of this rank's optimizer state; ``padded`` as in `model_tensors`."""
    optimizer = parts.optimizer
    if optimizer is None:
        return []
    # Megatron-LM's distributed optimizer has main parameters of fp32 weights too.
    every_main = padded and optimizer.is_sharded
    return [
        from_param(
            f"{_STATE_PREFIX}{kind}.{name}",
            info,
            tensor,
            replica_of(info, parts.groups),
            padded=padded,
        )
        for name, info, state in optimizer.named_state(every_main=every_main)
        for kind, tensor in state.items()
    ]


def main_param_tensors(parts: RunParts) -> list[TensorRecord]:
    """Return the optimizer's main parameters under the keys of the weights."""
    if parts.optimizer is None:
        return []
    return [
        from_param(name, info, state["fp32_param"], replica_of(info, parts.groups))
        for name, info, state in parts.optimizer.named_state()
        if "fp32_param" in state
    ]


def _named_tensors(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, ParamInfo, Tensor]]:
    """Yield global name, record and values; a tensor that two modules share only once."""
    seen = set()
    for chunk in chunks:
        kept = {without_wrappers(name) for name in chunk.state_dict(keep_vars=True)}
        buffers = ((n, b) for n, b in chunk.named_buffers() if without_wrappers(n) in kept)
        for local_name, tensor in (*chunk.named_parameters(), *buffers):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                info = info_of(cast(nn.Parameter, tensor))  # a buffer may have a record too
                yield info.name or without_wrappers(local_name), info, tensor


def rng_state() -> JsonObject:
    """Return the states of all random generators of this rank."""
    return plain_values.to_json(
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": device.rng_state() if device.is_cuda() else None,
            "rng_tracker_states": get_rng_tracker().get_states(),
        }
    )


def set_rng_state(values: JsonObject) -> None:
    """Restore the states that `rng_state` returned.

    If they were saved on the other kind of device (CPU, GPU), the device generator and the named
    streams are not changed.
    """
    states = plain_values.from_json(values)
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    has_device_state = states["cuda_rng_state"] is not None
    if has_device_state != device.is_cuda():
        return
    if has_device_state:
        device.set_rng_state(states["cuda_rng_state"])
    get_rng_tracker().set_states(states["rng_tracker_states"])
