"""Sections of a run for hang detection: training steps, steps of evaluations, checkpoints.

It is the first callback, so that a step ends before the work around it.  Collective over all ranks
with --calc-ft-timeouts: see `Monitor.learn`.
"""

from __future__ import annotations

from megatron.training.fault_tolerance import sections
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, ModelRun, PauseReason, TrainingRun


class Sections(Callback):
    """Report the sections of this rank to its `Monitor`, and let it learn its limits."""

    def on_step_start(self, run: TrainingRun) -> None:
        sections.monitor.begin_step(run.state.iteration + 1)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        sections.monitor.end_step()

    def on_eval_step_start(self, run: ModelRun) -> None:
        sections.monitor.begin("step")

    def on_eval_step_end(self, run: ModelRun) -> None:
        sections.monitor.end("step")

    def on_pause(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "checkpoint":
            sections.monitor.begin("checkpointing")

    def on_resume(self, run: TrainingRun, reason: PauseReason) -> None:
        if reason == "checkpoint":
            sections.monitor.end("checkpointing")
            sections.monitor.learn()

    def on_train_end(self, run: TrainingRun) -> None:
        sections.monitor.learn()

    def close(self) -> None:
        sections.monitor.close()
