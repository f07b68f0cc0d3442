"""Collect garbage at the same step on all ranks instead of at random times (--manual-gc).

A collection pauses one rank and, at the next collective, all others.
"""

from __future__ import annotations

import gc

from megatron.training.runtime.state import StepResult
from megatron.training.step.run import Callback, PauseReason, TrainingRun


class ManualGC(Callback):
    """Collect garbage every --manual-gc-interval steps (0: never) and around evaluations."""

    def on_train_start(self, run: TrainingRun) -> None:
        gc.disable()
        gc.collect()

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        interval = run.config.training.manual_gc_interval
        if interval and run.state.iteration % interval == 0:
            gc.collect()

    def on_pause(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "evaluation" and run.config.training.manual_gc_eval:
            gc.collect()

    def on_resume(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "evaluation" and run.config.training.manual_gc_eval:
            gc.collect(generation=0)  # only objects that the evaluation created

    def close(self) -> None:
        gc.enable()
