"""--train-sync-interval: let the CPU run ahead of the device by so many steps at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core import device
from megatron.training.callbacks.base import Callback

if TYPE_CHECKING:
    from megatron.training.runtime import Runtime
    from megatron.training.state import StepResult


class TrainSync(Callback):
    """Waits for the device every ``interval`` steps."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        if run.state.iteration % self._interval == 0:
            device.synchronize()
