"""The values of a step that are written while the next step runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.training.callbacks.records import StepRecord
from megatron.training.runtime.runtime import Runtime
from megatron.training.runtime.state import StepResult


class LateStep:
    """A record without losses, and copies of the losses that are on their way to the host.

    ``own``: the metrics of users.  With ``is_due`` the values of the step are part of the record.
    """

    def __init__(
        self,
        record: StepRecord,
        result: StepResult,
        own: Mapping[str, Tensor | float],
        *,
        is_due: bool,
    ) -> None:
        self._record = record
        self._result = result
        self._own = own
        self._is_due = is_due
        self._copy()

    def _copy(self) -> None:
        result = self._result
        self._copied_of = result.losses
        self._losses = _copies(result.losses if self._is_due else {})
        self._others = _copies({**result.layer_losses, **self._own} if self._is_due else {})

    @property
    def is_judged(self) -> bool:
        """Whether the host knows that the step was not rejected."""
        return self._result.is_judged

    def complete(self) -> StepRecord:
        """Return the record of a judged step with all values; blocks until they are copied."""
        if self._result.losses is not self._copied_of:
            self._copy()  # the step was computed again
        values = dict(self._record.values)
        if self._is_due:
            values |= step_values(self._result)
        values |= _values_of(self._others)
        return replace(self._record, losses=_values_of(self._losses), values=values)


def _copies(values: Mapping[str, Tensor | float]) -> dict[str, AsyncHostCopy]:
    return {key: AsyncHostCopy(torch.as_tensor(value)) for key, value in values.items()}


def _values_of(copies: Mapping[str, AsyncHostCopy]) -> dict[str, float]:
    return {key: copy.get() for key, copy in copies.items()}


def step_values(result: StepResult) -> dict[str, float]:
    """Return the values of a judged step by TensorBoard tag, without the losses."""
    values: dict[str, float | None] = {
        "learning-rate": result.learning_rate,
        "decoupled-learning-rate": result.decoupled_learning_rate,
        "loss-scale": result.loss_scale,
        "grad-norm": None if result.grad_norm is None else float(result.grad_norm),
        "num-zeros": result.num_zeros,
        "params-norm": result.params_norm,
        # the bits that a TensorBoard float holds; the log has all 64
        "params-hash": None if result.params_hash is None else result.params_hash >> 40,
    }
    return {tag: value for tag, value in values.items() if value is not None}


def run_values(run: Runtime, result: StepResult) -> dict[str, float]:
    """Return by TensorBoard tag the values of the run at the end of a step, judged or not."""
    logging = run.config.logging
    values: dict[str, float | None] = {
        "skipped-train-samples": run.state.skipped_train_samples or None,
        "batch-size": result.batch_size,
        "world-size": run.config.world_size if logging.log_world_size_to_tensorboard else None,
    }
    if logging.log_memory_to_tensorboard:
        stats = device.memory_stats()
        values |= {
            "mem-reserved-bytes": stats["reserved"],
            "mem-allocated-bytes": stats["allocated"],
            "mem-max-allocated-bytes": stats["max_allocated"],
            "mem-allocated-count": stats["allocated_count"],
        }
    return {tag: value for tag, value in values.items() if value is not None}
