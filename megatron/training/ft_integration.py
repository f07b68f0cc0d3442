"""Functions of Megatron-LM's ``ft_integration``, for scripts with their own train loop.

`megatron.training.pretrain` reports the same sections by itself.  The environment variable
FT_SIM_FAULT_DESC stops or kills one rank after a delay, to test a run.  Its value is
``kind;rank;delay``: rank_hung (SIGSTOP), rank_killed (SIGKILL) or random; the rank, or nothing for
a random one; seconds, to which up to a fifth is added at random.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import threading
from typing import Any

import torch.distributed as dist

from megatron.core.config.errors import ConfigError
from megatron.core.parallel.collectives import broadcast_json
from megatron.training.fault_tolerance import sections
from megatron.training.fault_tolerance.heartbeat import VARIABLE

_VARIABLE = "FT_SIM_FAULT_DESC"
_SIGNALS = {"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}
_JITTER = 0.2


def get_rank_monitor_client() -> Any:
    """Return NVIDIA's ``RankMonitorClient``, or None where ``ft_launcher`` is not used."""
    return sections.monitor.client


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
        sections.monitor.learn()


def on_checkpoint_loaded(is_local_chkpt: bool) -> None:
    """Let the limit of the setup be learned: one without loading, or from memory, is too short."""
    sections.monitor.has_loaded |= not is_local_chkpt


def shutdown() -> None:
    """Learn a last time, then end all sections."""
    sections.monitor.learn()
    sections.monitor.close()


def maybe_setup_simulated_fault() -> None:
    """Send this rank a signal later, if FT_SIM_FAULT_DESC is set and chooses this rank.

    Collective over all ranks if the variable is set: rank 0 draws.  Raises ConfigError.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return
    size = dist.get_world_size()
    kind, chosen, delay_s = _parse(text, size)
    draw = random.Random()
    kinds = [*_SIGNALS] if kind == "random" else [kind]
    drawn: list[Any] = [draw.randrange(size) if chosen is None else chosen, draw.choice(kinds)]
    rank, kind = broadcast_json(drawn, dist.group.WORLD)
    if rank == dist.get_rank():
        delay_s *= 1 + _JITTER * draw.random()
        print(f"rank {rank}: {_VARIABLE} causes {kind} in {delay_s:.1f} s", flush=True)
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), _SIGNALS[kind]))
        timer.daemon = True
        timer.start()


def _parse(text: str, world_size: int) -> tuple[str, int | None, float]:
    try:
        kind, rank_text, delay_text = (part.strip() for part in text.split(";"))
        rank = int(rank_text) if rank_text else None
        delay_s = float(delay_text)
        is_valid = kind in (*_SIGNALS, "random") and 0 <= delay_s < math.inf
        if is_valid and (rank is None or 0 <= rank < world_size):
            return kind, rank, delay_s
    except ValueError:
        pass
    raise ConfigError(
        f"environment variable {_VARIABLE}={text!r}: it must be KIND;RANK;SECONDS with KIND "
        f"rank_hung, rank_killed or random, and RANK empty or below {world_size}, for example "
        "'rank_hung;1;60'"
    )
