"""--manual-gc: collect garbage at the same step on all ranks, instead of whenever Python likes.

A collection stops one rank for a moment and, at the next collective, all of them.
"""

from __future__ import annotations

import gc

from megatron.training.runtime.runtime import Callback, PauseReason, Runtime
from megatron.training.runtime.state import StepResult


class ManualGC(Callback):
    """Collects every --manual-gc-interval steps (0: never) and around evaluations."""

    def on_train_start(self, run: Runtime) -> None:
        gc.disable()
        gc.collect()

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        interval = run.config.training.manual_gc_interval
        if interval and run.state.iteration % interval == 0:
            gc.collect()

    def on_pause(self, run: Runtime, reason: PauseReason) -> None:
        if reason == "evaluation" and run.config.training.manual_gc_eval:
            gc.collect()

    def on_resume(self, run: Runtime, reason: PauseReason) -> None:
        if reason == "evaluation" and run.config.training.manual_gc_eval:
            gc.collect(generation=0)  # only what the evaluation has made

    def close(self) -> None:
        gc.enable()
