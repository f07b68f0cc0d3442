"""Evaluate the validation sets every --eval-interval steps."""

from __future__ import annotations

from megatron.training.runtime.state import StepResult
from megatron.training.step.evaluate import evaluate_all
from megatron.training.step.run import Callback, TrainingRun


class EvaluationCallback(Callback):
    """Evaluate the validation sets.  Collective over all ranks."""

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        interval = run.config.validation.eval_interval
        if not interval or run.state.iteration % interval or not run.data.valid_loaders:
            return
        with run.callbacks.paused(run, "evaluation"):
            results = evaluate_all(run)
        for evaluated in results:
            run.callbacks.on_eval_end(run, evaluated)
