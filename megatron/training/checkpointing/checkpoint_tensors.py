"""The tensors of a run under their layout-free keys: weights, and the optimizer's state.

A weight has its global name as key; ``optimizer.state.exp_avg.<name>`` is its first moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import (
    OPTIMIZER_PREFIX,
    Packed,
    ShardedTensor,
    from_param,
    replica_of,
)
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.optimizer.param_groups import without_wrappers
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, info_of, local_part

_STATE_PREFIX = f"{OPTIMIZER_PREFIX}state."


class Stateful(Protocol):
    """A scheduler: its state is JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class CheckpointableOptimizer(Protocol):
    """What an optimizer offers to be saved in any layout."""

    is_sharded: bool

    def named_state(
        self, *, every_main: bool = False
    ) -> Iterable[tuple[str, ParamInfo, Mapping[str, Tensor | Packed]]]:
        """Per parameter: global name, record, live state of its local shape."""

    def scalar_state(self) -> dict[str, Any]:
        """Steps, loss scale and whatever else is one value for all ranks, as JSON."""

    def load_scalar_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `scalar_state` returned, after the tensors were filled."""

    def reload_model_params(self) -> None:
        """Copy the weights to the main parameters, after only weights were loaded."""


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The live objects that a checkpoint is made from and loaded into."""

    model_chunks: Sequence[nn.Module]
    groups: ProcessGroupCollection
    optimizer: CheckpointableOptimizer | None = None
    scheduler: Stateful | None = None
    stages: Sequence[Sequence[int]] = ()  # layers of each virtual stage, for a file per rank
    kind: str | None = None  # --model-kind
    asked: Mapping[str, Any] | None = None  # this run's command line; None: nobody compares it


def model_tensors(parts: RunParts, *, padded: bool = False) -> list[ShardedTensor]:
    """Weights and persistent buffers of this rank.  Collective while parameters come in.

    ``padded``: with rows of vocabulary padding.
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


def optimizer_tensors(parts: RunParts, *, padded: bool = False) -> list[ShardedTensor]:
    """State of the optimizer on this rank; ``padded`` as for weights."""
    if parts.optimizer is None:
        return []
    return [
        from_param(
            f"{_STATE_PREFIX}{kind}.{name}",
            info,
            tensor,
            replica_of(info, parts.groups),
            padded=padded,
        )
        for name, info, state in _named_state(parts.optimizer, padded)
        for kind, tensor in state.items()
    ]


def _named_state(
    optimizer: CheckpointableOptimizer, padded: bool
) -> Iterable[tuple[str, ParamInfo, Mapping[str, Tensor | Packed]]]:
    """Megatron-LM's distributed optimizer has main parameters of fp32 weights too."""
    if padded and optimizer.is_sharded:
        return optimizer.named_state(every_main=True)
    return optimizer.named_state()


def main_param_tensors(parts: RunParts) -> list[ShardedTensor]:
    """The optimizer's main parameters under the keys of the weights."""
    if parts.optimizer is None:
        return []
    return [
        from_param(name, info, state["fp32_param"], replica_of(info, parts.groups))
        for name, info, state in parts.optimizer.named_state()
        if "fp32_param" in state
    ]


def _named_tensors(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, ParamInfo, Tensor]]:
    """Global name, record and values; a tensor that two modules share comes once."""
    seen: set[int] = set()
    for chunk in chunks:
        for local_name, tensor in (*chunk.named_parameters(), *_persistent_buffers(chunk)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                info = info_of(cast(nn.Parameter, tensor))  # a buffer may have a record too
                yield info.name or without_wrappers(local_name), info, tensor


def _persistent_buffers(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = {without_wrappers(name) for name in chunk.state_dict(keep_vars=True)}
    return ((n, buffer) for n, buffer in chunk.named_buffers() if without_wrappers(n) in kept)
