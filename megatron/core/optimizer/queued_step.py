"""An update that is queued before the host knows the norm of its gradients."""

from __future__ import annotations

import math

from megatron.core.diagnostics.sent_norm import ReadNorm, SentNorm
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.rerun_state_machine import RerunStateMachine


class QueuedStep:
    """Result of `MegatronOptimizer.queue_step`; the device decides whether it updates anything.

    ``is_checked``: a norm that is not finite is rejected, instead of skipping the step.
    """

    def __init__(self, sent: SentNorm, grad_scaler: GradScaler | None, *, is_checked: bool) -> None:
        self.is_checked = is_checked
        self._sent = sent
        self._grad_scaler = grad_scaler
        self._scale = 1.0 if grad_scaler is None else grad_scaler.scale
        self._state_of_scaler = None if grad_scaler is None else grad_scaler.state_dict()
        self._read: ReadNorm | None = None

    def read(self) -> ReadNorm:
        """Return the values of the step; the first call adapts the loss scale.

        Blocks the host until the device has computed the norm.
        """
        if self._read is None:
            self._read = self._sent.read()
            if self._grad_scaler is not None:
                self._grad_scaler.update(is_not_finite(self._read.squares))
        return self._read

    def result(self) -> tuple[bool, float | None, int | None]:
        """Return as `MegatronOptimizer.step` the result of the step, which was not rejected."""
        squares = self.read().squares
        if is_not_finite(squares):
            return False, None, None
        return True, math.sqrt(squares) / self._scale, None

    def reject(self, machine: RerunStateMachine) -> None:
        """Restore the loss scale, and let ``machine`` validate the norm of the rejected step.

        The gradients are gone, so that the message cannot name them.
        """
        if self._grad_scaler is not None and self._state_of_scaler is not None:
            self._grad_scaler.load_state_dict(self._state_of_scaler)
        if self.is_checked:
            validate_norm(machine, math.sqrt(self.read().squares), None, is_shared=True)


def validate_norm(
    machine: RerunStateMachine, norm: float, culprits: str | None, *, is_shared: bool
) -> None:
    """Let ``machine`` reject a gradient norm that is not finite; ``culprits`` names gradients."""
    machine.validate_result(
        norm,
        is_not_finite,
        "found NaN or Inf in the global gradient norm",
        is_shared=is_shared,
        detail=lambda: "" if culprits is None else f"; {culprits}",
    )


def is_not_finite(value: float) -> bool:
    """Return whether ``value`` is NaN or infinite."""
    return not math.isfinite(value)
