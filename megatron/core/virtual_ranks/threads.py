"""Run a function on virtual ranks: in threads, each with a default process group of its own.

torch.distributed, the environment and `rank_local` variables have the values that they would have
if the rank were a process.  The ranks share everything else of the process: standard output, signal
handlers, the number of threads per operation, and global variables of scripts.

One thread runs at a time, until its rank must wait for another one.  So a run is deterministic.  At
each switch the scheduler saves and restores the rank-local variables (see
`megatron.core.rank_local`), the states of the random generators, and RANK in the environment; a
debugger sees those of the running rank.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed import distributed_c10d

from megatron.core import rank_local
from megatron.core.config.errors import ConfigError
from megatron.core.virtual_ranks import BACKEND, transport

_VARIABLES = ("RANK", "LOCAL_RANK")
_NOT_THE_CALLERS = tuple(os.path.dirname(f) for f in (__file__, torch.__file__)) + (
    threading.__file__,
)


RandomStates = tuple[tuple[Any, ...], Any, torch.Tensor]  # states of Python, numpy, torch


class DeadlockError(RuntimeError):
    """Deadlock of virtual ranks: every rank waits for another one."""


class RankStopped(BaseException):
    """Exception that ends a rank after another one has failed.

    A BaseException, since code of the rank may catch Exception.
    """


@dataclass
class _Rank:
    turn: threading.Semaphore
    random_states: RandomStates
    thread_id: int = 0
    is_ready: Callable[[], bool] = bool  # condition that the rank waits for
    doing: Callable[[], str] | None = None  # describes the wait; None while the rank can run
    has_ended: bool = False
    variables: rank_local.State = field(default_factory=dict)


class Baton:
    """Scheduler of virtual ranks; only the running rank (``holder``) calls its methods."""

    def __init__(self, world_size: int) -> None:
        states = random_states()
        self._ranks = [_Rank(threading.Semaphore(0), states) for _ in range(world_size)]
        self.holder = 0
        self.failure: tuple[int, BaseException] | None = None  # the first one, and its rank

    def begin(self, rank: int) -> None:
        """Start a rank in its thread: wait until it is scheduled; rank 0 runs first."""
        self._ranks[rank].thread_id = threading.get_ident()
        if rank:
            self._await_turn(rank)

    def wait_until(self, is_ready: Callable[[], bool], doing: Callable[[], str]) -> None:
        """Let other ranks run until ``is_ready()``; ``doing`` describes the wait for reports.

        Raises DeadlockError if no rank can run.
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
        """End a rank (``__exit__`` of a context): store its failure and run the next rank."""
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
        """Return the next rank, round robin, that need not wait; None if there is none."""
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
    """Return file and line of the code that called torch.distributed."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
        frame = frame.f_back
    return "" if frame is None else f", at {frame.f_code.co_filename}:{frame.f_lineno}"


def random_states() -> RandomStates:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: RandomStates) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


T = TypeVar("T")
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_TORCH = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_group_count",
    "_tags_to_pg",
    "_pg_to_tag",
    "_backend",
    "_default_pg_init_method",
)


def run(fn: Callable[..., T], world_size: int, *args: object) -> list[T | None]:
    """Run ``fn(rank, world_size, *args)`` on every rank; return the results in rank order.

    The result of a rank that has called ``sys.exit(0)`` is None.

    Rank 0 runs in the calling thread.  If a rank raises, the other ranks end at their next wait,
    and this function raises the exception; DeadlockError reports what each rank waits for.  Raises
    ConfigError if torch.distributed is initialized already.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"{world_size} virtual ranks: torch.distributed is initialized already; start them "
            "first, in a process that no launcher started"
        )
    results: dict[int, T] = {}
    baton = Baton(world_size)

    def live(rank: int) -> None:
        with contextlib.ExitStack() as life:
            life.push(baton.end)
            baton.begin(rank)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
            life.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
            # Run backward in the rank's own thread: autograd's device threads serve all ranks.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(rank, world_size, *args)

    with _shared_process(world_size), transport.network_of(baton):
        store = dist.HashStore()
        threads = [
            threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(1, world_size)
        ]
        for thread in threads:
            thread.start()
        live(0)
        for thread in threads:
            thread.join()
    if baton.failure is not None:
        rank, error = baton.failure
        print(f"virtual rank {rank} failed: {type(error).__name__}: {error}", file=sys.stderr)
        raise error
    return [results.get(rank) for rank in range(world_size)]


@contextlib.contextmanager
def _shared_process(world_size: int) -> Iterator[None]:
    """Set the process-wide state that virtual ranks need, and restore it at the end.

    That is: torch's tables of process groups, random states, environment and exception hook.
    """
    world = distributed_c10d._world
    rank_local.each_rank_owns(distributed_c10d, *_TORCH)
    rank_local.each_rank_owns(world, *vars(world))
    before, randomness, hook = rank_local.take(), random_states(), sys.excepthook
    environment = dict(os.environ)
    os.environ.update(dict(zip(_LAUNCH, ("0", "0", str(world_size), str(world_size)), strict=True)))
    rank_local.put({})
    _set_thread_isolation_mode(True)  # torch's C++ registry of group names becomes thread-local
    try:
        yield
    finally:
        _set_thread_isolation_mode(False)
        rank_local.put(before)
        set_random_states(randomness)
        sys.excepthook = hook
        for name in _LAUNCH:
            os.environ.pop(name, None)
        os.environ.update(environment)
