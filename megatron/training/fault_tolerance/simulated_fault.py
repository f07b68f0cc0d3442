"""FT_SIM_FAULT_DESC: stop or kill one rank after a delay, as Megatron-LM does for tests.

The value is ``kind;rank;delay``: rank_hung (SIGSTOP), rank_killed (SIGKILL) or random; the rank, or
nothing for a random one; seconds, to which up to a fifth is added at random.
"""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.config.errors import ConfigError

_VARIABLE = "FT_SIM_FAULT_DESC"
_SIGNALS = {"rank_hung": signal.SIGSTOP, "rank_killed": signal.SIGKILL}
_JITTER = 0.2


def _send_later(delay_s: float, signum: int) -> None:
    def send() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signum)

    threading.Thread(target=send, name=_VARIABLE, daemon=True).start()


def simulate_fault(send_later: Callable[[float, int], None] = _send_later) -> None:
    """Send this rank a signal later, if the variable is set and chooses this rank.

    Collective over all ranks if the variable is set: rank 0 draws.  Raises ConfigError.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return
    size = dist.get_world_size()
    kind, chosen, delay_s = _parsed(text, size)
    draw = random.Random()
    kinds = list(_SIGNALS)
    drawn = torch.tensor(
        [
            draw.randrange(size) if chosen is None else chosen,
            draw.randrange(len(kinds)) if kind == "random" else kinds.index(kind),
        ],
        device=device.current(),
    )
    if size > 1:
        dist.broadcast(drawn, src=0)
    rank = int(drawn[0])
    kind = kinds[int(drawn[1])]
    if rank == dist.get_rank():
        delay_s *= 1 + _JITTER * draw.random()
        print(f"rank {rank}: {_VARIABLE} causes {kind} in {delay_s:.1f} s", flush=True)
        send_later(delay_s, _SIGNALS[kind])


def _parsed(text: str, world_size: int) -> tuple[str, int | None, float]:
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
