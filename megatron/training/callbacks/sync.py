"""Limit how many steps the CPU may run ahead of the device (--train-sync-interval)."""

from __future__ import annotations

from megatron.core import device
from megatron.training.runtime.state import StepResult
from megatron.training.step.run import Callback, TrainingRun


class TrainSync(Callback):
    """Synchronise with the device every ``interval`` steps."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if run.state.iteration % self._interval == 0:
            device.synchronize()
