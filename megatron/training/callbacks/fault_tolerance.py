"""Sections of a run for hang detection: training steps, steps of evaluations, checkpoints.

It is the first callback, so that a step ends before the work around it.  With --calc-ft-timeouts
each `learn` is collective over all ranks; it is called after a save, at the end, and when enough
steps were seen, which is the same on all ranks.
"""

from __future__ import annotations

from megatron.core.parallel.collectives import largest_of_ranks
from megatron.training.fault_tolerance import sections
from megatron.training.fault_tolerance.heartbeat import MIN_COUNTS
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, ModelRun, PauseReason, TrainingRun


class Sections(Callback):
    """Report the sections of this rank to its `Monitor`, and let it learn its limits."""

    def __init__(self, agrees: bool) -> None:
        """Create the callback; ``agrees``: all ranks learn the same limits."""
        self._largest = largest_of_ranks if agrees else None
        self._steps = 0

    def on_step_start(self, run: TrainingRun) -> None:
        sections.monitor.begin_step(run.state.iteration + 1)

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        sections.monitor.end_step()
        self._steps += 1
        if self._steps == MIN_COUNTS["step"] + 2:  # the first step is part of the setup
            sections.monitor.learn(self._largest)

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
            sections.monitor.learn(self._largest)

    def on_train_end(self, run: TrainingRun) -> None:
        sections.monitor.learn(self._largest)

    def close(self) -> None:
        sections.monitor.close()
