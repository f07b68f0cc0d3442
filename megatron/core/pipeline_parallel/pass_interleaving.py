"""Two passes in two threads that take turns: one computes while what the other sends travels.

A pass that has begun a collective gives way before it waits for it.  One thread runs at a time and
hands over at the same places every time, so that all ranks begin their collectives in one order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

import torch

from megatron.core import device

# Autograd hands this thread-local state on to the threads in which it computes.
_TURNS = "megatron turns"


class _Stopped(BaseException):
    """Unwinds a pass when the other one has failed."""


class _Turns:
    def __init__(self, before_giving_way: Callable[[int], None]) -> None:
        self.before_giving_way = before_giving_way
        self.turns = (threading.Semaphore(0), threading.Semaphore(0))
        self.running = 0  # which of the two
        self.has_ended = [False, False]
        self.failure: BaseException | None = None

    def yield_to_peer(self) -> None:
        me = self.running
        self.before_giving_way(me)
        if not self.has_ended[1 - me]:
            self._run_the_other()
            self.await_turn(me)

    def await_turn(self, me: int) -> None:
        self.turns[me].acquire()
        if self.failure is not None:
            raise _Stopped

    def _run_the_other(self) -> None:
        self.running = 1 - self.running
        self.turns[self.running].release()

    def run(self, me: int, work: Callable[[], None]) -> None:
        """All of one pass."""
        torch._C._stash_obj_in_tls(_TURNS, self)
        with contextlib.ExitStack() as stack:
            stack.push(partial(self._end, me))
            if me == 1:
                device.use_in_this_thread()
                self.await_turn(me)
            work()

    def _end(
        self, me: int, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """Last words of a pass, as the exit of a context: its failure is kept here."""
        del kind, trace
        torch._C._stash_obj_in_tls(_TURNS, None)
        if error is not None and not isinstance(error, _Stopped):
            self.failure = error
        self.has_ended[me] = True
        self._run_the_other()
        return True


def run_in_turns(
    first: Callable[[], None],
    second: Callable[[], None],
    before_giving_way: Callable[[int], None] = lambda _: None,
) -> None:
    """Do both, ``second`` in a thread of its own; ``first`` begins.

    ``before_giving_way`` is called in a pass, 0 or 1, that has begun a collective.
    """
    turns = _Turns(before_giving_way)
    thread = threading.Thread(target=turns.run, args=(1, second), daemon=True)
    thread.start()
    turns.run(0, first)
    thread.join()
    if turns.failure is not None:
        raise turns.failure


def yield_to_peer() -> None:
    """Let the other pass compute, where there is one; called before waiting for a collective."""
    if torch._C._is_key_in_tls(_TURNS):
        turns = torch._C._get_obj_in_tls(_TURNS)
        if turns is not None:
            turns.yield_to_peer()
