"""Evaluates the validation sets every --eval-interval steps."""

from __future__ import annotations

from megatron.training.callbacks.base import Callback
from megatron.training.evaluate import evaluate_all
from megatron.training.runtime import Runtime
from megatron.training.state import StepResult


class EvaluationCallback(Callback):
    """Collective over all ranks."""

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        interval = run.config.validation.eval_interval
        if not interval or run.state.iteration % interval or not run.valid_loaders:
            return
        with run.callbacks.paused(run, "evaluation"):
            results = evaluate_all(run)
        for evaluated in results:
            run.callbacks.on_eval_end(run, evaluated)
