"""End a run before its last iteration: after a signal, a duration or at an interval.

The conditions are checked in this order after every step, after logging, evaluation and the regular
save.  The first that holds is the reported reason.  The run then saves a checkpoint, unless this
step has one already.

Order of collectives in a step: the signal flag (one all-reduce, with --exit-signal-handler), the
elapsed time (one all-reduce, with --exit-duration-in-mins).
"""

from __future__ import annotations

from megatron.training.callbacks.checkpoint import save_last
from megatron.training.process.signals import StopSignal
from megatron.training.runtime.state import StepResult
from megatron.training.runtime.stop_requests import minutes_over_limit, received_anywhere
from megatron.training.step.run import Callback, TrainingRun


class ExitConditions(Callback):
    """Stop the run when an exit condition holds.

    ``stop_signal`` is the handler that --exit-signal-handler has installed.
    """

    def __init__(self, stop_signal: StopSignal | None) -> None:
        self._stop_signal = stop_signal

    def on_step_end(self, run: TrainingRun, result: StepResult) -> None:
        if self._stop_signal is not None and received_anywhere(self._stop_signal):
            run.state.stop(f"exiting program after receiving {self._stop_signal.name}.")
        minutes = minutes_over_limit(run)
        if minutes is not None:
            run.state.stop(f"exiting program after {minutes} minutes")
        interval = run.config.training.exit_interval
        if interval and run.state.iteration % interval == 0:
            run.state.stop(f"exiting program at iteration {run.state.iteration}")

    def on_train_end(self, run: TrainingRun) -> None:
        if run.state.stop_reason is not None:
            save_last(run)
