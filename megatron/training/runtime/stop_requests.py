"""Agree on stop requests: a signal to any rank, or --exit-duration-in-mins."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.training.process.signals import StopSignal, catch_stop_signal
from megatron.training.runtime.context import RunContext


def received_anywhere(stop_signal: StopSignal) -> bool:
    """Return whether any rank has received the signal.  Collective over all ranks."""
    return on_any_rank(stop_signal.received)


def on_any_rank(flag: bool) -> bool:
    """Return whether ``flag`` is True on a rank.  Collective over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    largest = torch.tensor([int(flag)], device=device.current())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return bool(largest.item())


def reason_to_hurry(run: RunContext) -> str | None:
    """Return why an evaluation must end early, or None; the loop then stops for the same reason.

    Collective over all ranks if --exit-duration-in-mins or --exit-signal-handler is given.
    """
    if minutes_over_limit(run) is not None:
        return "timelimit reached"
    if run.config.training.exit_signal_handler:
        stop_signal = catch_stop_signal()
        if received_anywhere(stop_signal):
            return f"{stop_signal.name} received"
    return None


def minutes_over_limit(run: RunContext) -> float | None:
    """Return the run time in minutes once it exceeds --exit-duration-in-mins, otherwise None.

    The result is the same on all ranks: the time of the rank that started first.  Collective over
    all ranks if the flag is given.
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
