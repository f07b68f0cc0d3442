"""When a run ends before its last iteration: a signal, a duration, an interval.

The conditions are looked at after every step, behind logging, evaluation and the regular save, in
this order; the first that holds gives the reason.  The run then saves, unless it just has.

Order of collectives of a step: the signal flag (one all-reduce, with --exit-signal-handler), the
elapsed time (one all-reduce, with --exit-duration-in-mins).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.training.callbacks.base import Callback
from megatron.training.checkpoint_io import save_last
from megatron.training.signals import StopSignal, catch_stop_signal

if TYPE_CHECKING:
    from megatron.training.runtime import Runtime
    from megatron.training.state import StepResult


class ExitConditions(Callback):
    """Stops the run; ``stop_signal`` is the installed handler with --exit-signal-handler."""

    def __init__(self, stop_signal: StopSignal | None) -> None:
        self._stop_signal = stop_signal

    def on_step_end(self, run: Runtime, result: StepResult) -> None:
        if self._stop_signal is not None and received_anywhere(self._stop_signal):
            run.state.stop(f"exiting program after receiving {self._stop_signal.name}.")
        minutes = minutes_over_limit(run)
        if minutes is not None:
            run.state.stop(f"exiting program after {minutes} minutes")
        interval = run.config.training.exit_interval
        if interval and run.state.iteration % interval == 0:
            run.state.stop(f"exiting program at iteration {run.state.iteration}")

    def on_train_end(self, run: Runtime) -> None:
        if run.state.stop_reason is not None:
            save_last(run)


def received_anywhere(stop_signal: StopSignal) -> bool:
    """Whether any rank has received it.  Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return stop_signal.received
    flag = torch.tensor([int(stop_signal.received)], device=device.current())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def reason_to_hurry(run: Runtime) -> str | None:
    """Why an evaluation is not finished; the loop then stops for the same reason.

    Collective over all ranks if --exit-duration-in-mins or --exit-signal-handler is given.
    """
    if minutes_over_limit(run) is not None:
        return "timelimit reached"
    if run.config.training.exit_signal_handler:
        stop_signal = catch_stop_signal()
        if received_anywhere(stop_signal):
            return f"{stop_signal.name} received"
    return None


def minutes_over_limit(run: Runtime) -> float | None:
    """Minutes since the first rank started, once any rank is beyond --exit-duration-in-mins.

    Collective over all ranks if that flag is given; the same on all of them.
    """
    limit = run.config.training.exit_duration_in_mins
    if not limit:
        return None
    minutes = (time.time() - run.started_at_s) / 60.0
    if dist.is_initialized() and dist.get_world_size() > 1:
        longest = torch.tensor([minutes], dtype=torch.float64, device=device.current())
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        minutes = float(longest.item())
    return minutes if minutes > limit else None
