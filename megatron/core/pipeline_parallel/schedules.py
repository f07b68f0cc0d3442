"""get_forward_backward_func and the schedule without pipelining.

Order of collectives: those of the model in each pass; after the last backward pass those of
``hooks.finalize_model_grads_func``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.microbatch import (
    ForwardStepFunc,
    LossRule,
    StepLosses,
    backward_step,
    collect_step,
    forward_step,
)
from megatron.core.pipeline_parallel.step_hooks import StepHooks
from megatron.core.process_groups_config import ProcessGroupCollection

T = TypeVar("T")
_NO_HOOKS = StepHooks()


class ScheduleConfig(Protocol):
    """What a schedule reads of a model's configuration."""

    @property
    def calculate_per_token_loss(self) -> bool: ...


@runtime_checkable
class _SyncsGradients(Protocol):
    def no_sync(self) -> AbstractContextManager[None]: ...


def get_forward_backward_func() -> Callable[..., list[Any]]:
    """The schedule of this layout."""
    return forward_backward_no_pipelining


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStepFunc,
    data_iterator: Any,
    model: nn.Module | Sequence[nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: object = None,
    config: ScheduleConfig | None = None,
    groups: ProcessGroupCollection | None = None,
    hooks: StepHooks = _NO_HOOKS,
) -> list[Any]:
    """All micro-batches of a step on one stage, one after the other.

    Gradients are the step's when it returns, unless ``forward_only``.  Returns what the loss
    function reported, one entry per micro-batch.  ``first_val_step`` False means that weights
    have not changed since the last call.  Sizes, and what adjusts them, are for stages that
    exchange tensors.
    """
    del seq_length, micro_batch_size, decoder_seq_length, adjust_tensor_shapes_fn
    chunk, data = _only(model), _only(data_iterator)
    groups = groups or parallel_state.current()
    config = config or chunk.config  # type: ignore[assignment]
    assert config is not None
    assert groups.pp.size() == 1, "a model of several stages needs a pipeline schedule"
    rule = LossRule(
        num_microbatches=num_microbatches,
        per_token=config.calculate_per_token_loss,
        cp_group=groups.cp,
    )
    losses = StepLosses()
    if hooks.first_microbatch_func is not None and not (forward_only and first_val_step is False):
        hooks.first_microbatch_func()
    for microbatch in range(num_microbatches):
        is_last = microbatch == num_microbatches - 1
        with nullcontext() if is_last or forward_only else _no_sync(chunk, hooks):
            with hooks.timed("forward-compute"), torch.set_grad_enabled(not forward_only):
                if collect_non_loss_data:
                    collect_step(forward_step_func, data, chunk, losses)
                    continue
                loss = forward_step(forward_step_func, data, chunk, losses, rule)
            if not forward_only:
                with hooks.timed("backward-compute"):
                    backward_step(loss, microbatch, hooks)
    if hooks.finalize_model_grads_func is not None and not forward_only:
        with hooks.timed("all-grads-sync", log_level=1):
            hooks.finalize_model_grads_func(
                [chunk], losses.num_tokens if rule.per_token else None
            )
    return losses.reported


def _no_sync(chunk: nn.Module, hooks: StepHooks) -> AbstractContextManager[Any]:
    if hooks.no_sync_func is not None:
        return hooks.no_sync_func()
    return chunk.no_sync() if isinstance(chunk, _SyncsGradients) else nullcontext()


def _only(value: T | Sequence[T]) -> T:
    """The element of a list of one; anything else as it is."""
    if isinstance(value, list | tuple):
        assert len(value) == 1, f"one stage runs one model chunk, not {len(value)}"
        return value[0]
    return value  # type: ignore[return-value]
