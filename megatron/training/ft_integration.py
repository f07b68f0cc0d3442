"""Functions of Megatron-LM's ``ft_integration``, for scripts with their own train loop.

`megatron.training.pretrain` reports the same sections by itself.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from megatron.training.callbacks.fault_tolerance import largest_of_ranks
from megatron.training.fault_tolerance import sections
from megatron.training.fault_tolerance.heartbeat import VARIABLE
from megatron.training.fault_tolerance.limits import MIN_COUNTS
from megatron.training.fault_tolerance.simulated_fault import simulate_fault


def get_rank_monitor_client() -> Any:
    """Return NVIDIA's ``RankMonitorClient``, or None where ``ft_launcher`` is not used."""
    client = sections.monitor.client
    return None if client is None else client.client


def setup(args: argparse.Namespace) -> None:
    """Begin the section of the setup; ``args`` has ``save`` and ``calc_ft_timeouts``."""
    sections.monitor.start(os.environ.get(VARIABLE))
    sections.monitor.enable(args.save, args.calc_ft_timeouts)


def on_training_step_start() -> None:
    """Begin a training step; the first one is part of the setup."""
    sections.monitor.begin_step()


def on_training_step_end() -> None:
    """End a training step."""
    sections.monitor.end_step()
    if sections.monitor.seen.counts.get("step") == MIN_COUNTS["step"]:
        _learn()


def on_eval_step_start() -> None:
    """Begin a step of an evaluation."""
    sections.monitor.begin("step")


def on_eval_step_end() -> None:
    """End a step of an evaluation."""
    sections.monitor.end("step")


def on_checkpointing_start() -> None:
    """Begin to save a checkpoint."""
    sections.monitor.begin("checkpointing")


def on_checkpointing_end(is_async_finalization: bool) -> None:
    """End the save of a checkpoint, or the last part of one in the background."""
    sections.monitor.end("checkpointing")
    if not is_async_finalization:
        _learn()


def on_checkpoint_loaded(is_local_chkpt: bool) -> None:
    """Let the limit of the setup be learnt: one without loading, or from memory, is too short."""
    sections.monitor.has_loaded |= not is_local_chkpt


def shutdown() -> None:
    """Learn a last time, then end all sections."""
    _learn()
    sections.monitor.close()


def maybe_setup_simulated_fault() -> None:
    """Start the fault that FT_SIM_FAULT_DESC describes, if it is set."""
    simulate_fault()


def _learn() -> None:
    sections.monitor.learn(largest_of_ranks if sections.monitor.saves else None)
