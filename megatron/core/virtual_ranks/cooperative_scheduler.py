"""Threads that are ranks: one runs at a time, until it has to wait for another.

So a run is the same every time, and a rank that stands in a debugger finds everything that is its
own (see `megatron.core.rank_local`), its random numbers and its RANK in the environment.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch

from megatron.core import rank_local

_VARIABLES = ("RANK", "LOCAL_RANK")
_NOT_THE_CALLERS = tuple(os.path.dirname(f) for f in (__file__, torch.__file__)) + (
    threading.__file__,
)


RandomStates = tuple[tuple[Any, ...], Any, torch.Tensor]  # of Python, numpy, torch


class DeadlockError(RuntimeError):
    """Every rank waits for another one."""


class RankStopped(BaseException):
    """Unwinds a rank after another one has failed; no ``except Exception`` keeps it."""


@dataclass
class _Rank:
    turn: threading.Semaphore
    random_states: RandomStates
    thread_id: int = 0
    is_ready: Callable[[], bool] = bool  # asked while the rank waits
    doing: Callable[[], str] | None = None  # what it waits for; None while it does not
    has_ended: bool = False
    variables: rank_local.State = field(default_factory=dict)


class Baton:
    """Who runs.  Methods are called by the rank that does."""

    def __init__(self, world_size: int) -> None:
        states = random_states()
        self._ranks = [_Rank(threading.Semaphore(0), states) for _ in range(world_size)]
        self.holder = 0
        self.failure: tuple[int, BaseException] | None = None  # the first one, and its rank

    def begin(self, rank: int) -> None:
        """First words of a rank's thread: wait for its first turn, which rank 0 has at once."""
        self._ranks[rank].thread_id = threading.get_ident()
        if rank:
            self._await_turn(rank)

    def wait_until(self, is_ready: Callable[[], bool], doing: Callable[[], str]) -> None:
        """Let others run until ``is_ready``; ``doing`` tells what this rank waits for.

        Raises DeadlockError if that can never be.
        """
        if is_ready():
            return
        mine = self.holder
        me = self._ranks[mine]
        me.is_ready, me.doing = is_ready, doing
        following = self._next()
        if following is None:
            raise self._fail_in_deadlock()
        if following != mine:
            self._switch_to(following)
            self._await_turn(mine)
        me.doing = None

    def end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """Last words of a rank's thread, as the exit of a context: its failure is kept here."""
        is_failure = not isinstance(error, RankStopped) and not (
            isinstance(error, SystemExit) and not error.code
        )
        if error is not None and is_failure and self.failure is None:
            self.failure = (self.holder, error)
        self._ranks[self.holder].has_ended = True
        following = self._next()
        if following is None and not all(rank.has_ended for rank in self._ranks):
            self._fail_in_deadlock()
            following = self._next()
        if following is not None:
            self._switch_to(following)
        return True

    def _next(self) -> int | None:
        """The rank that runs next, in the order of their numbers: one that need not wait."""
        count = len(self._ranks)
        for step in range(1, count + 1):
            number = (self.holder + step) % count
            rank = self._ranks[number]
            if not rank.has_ended and (self.failure or rank.doing is None or rank.is_ready()):
                return number
        return None

    def _switch_to(self, number: int) -> None:
        old, new = self._ranks[self.holder], self._ranks[number]
        old.variables = rank_local.take()
        old.random_states = random_states()
        rank_local.put(new.variables)
        set_random_states(new.random_states)
        os.environ.update(dict.fromkeys(_VARIABLES, str(number)))
        self.holder = number
        new.turn.release()

    def _await_turn(self, mine: int) -> None:
        turn = self._ranks[mine].turn
        try:
            turn.acquire()
        except KeyboardInterrupt as stop:  # in the main thread, while another rank runs
            self.failure = self.failure or (mine, stop)
            turn.acquire()
            raise
        if self.failure:
            raise RankStopped

    def _fail_in_deadlock(self) -> DeadlockError:
        frames = sys._current_frames()
        lines = ["every rank waits for another one:"]
        for number, rank in enumerate(self._ranks):
            what = "has ended" if rank.has_ended else rank.doing() if rank.doing else "runs"
            place = "" if rank.has_ended else _place(frames.get(rank.thread_id))
            lines.append(f"  rank {number}: {what}{place}")
        error = DeadlockError("\n".join(lines))
        self.failure = self.failure or (self.holder, error)
        return error


def _place(frame: FrameType | None) -> str:
    """Where the caller of torch.distributed stands."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"


def random_states() -> RandomStates:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: RandomStates) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
