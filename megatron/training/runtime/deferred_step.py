"""A step whose result the host reads while the next step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.distributed.non_finite import GradientCheck, LossCheck
from megatron.core.optimizer.queued_step import QueuedStep
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.training.runtime.state import StepResult, TrainState


@dataclass(frozen=True, kw_only=True)
class DeferredStep:
    """A step that was queued; its update may still be rejected."""

    result: StepResult  # not judged yet
    queued: QueuedStep
    loss_check: LossCheck | None
    unread: Sequence[tuple[AsyncHostCopy, int]]  # of `GradientCheck.take_deferred`
    before: TrainState  # counters before the step
    num_microbatches: int

    def reject(self, machine: RerunStateMachine) -> None:
        """Repeat the validations of the first pass, in their order; ``machine`` notes them."""
        if self.loss_check is not None:
            self.loss_check.check_deferred(self.queued.read().losses)
        GradientCheck.check_deferred(self.unread)
        self.queued.reject(machine)
