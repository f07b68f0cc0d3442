"""Limit how many steps the CPU may run ahead of the device (--train-sync-interval)."""

from __future__ import annotations

from megatron.core import device
from megatron.training.runtime.runtime import Callback, Runtime
from megatron.training.runtime.state import StepResult


class TrainSync(Callback):
    """Synchronise with the device every ``interval`` steps."""

    def __init__(self, interval: int) -> None:
        self._interval = interval

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        if run.state.iteration % self._interval == 0:
            device.synchronize()
