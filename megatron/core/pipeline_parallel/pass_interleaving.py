"""Interleave two micro-batch passes so that one computes while the other communicates.

Each pass runs in a thread of its own, but only one thread runs at a time.  A pass that has started
an asynchronous collective calls `yield_to_peer` before it waits for the collective; the call
resumes the other pass.

Order of collectives: the threads switch at these calls and at the end of a pass, never by
preemption.  All ranks execute the same passes, so all ranks start the collectives of both passes in
the same order.  Threads without this control would start them in a different order on each rank,
and the ranks would deadlock.

Why threads and not a plan of parts of layers: docs/experts.md, "Two threads or a schedule plan".
benchmarks/pass_interleaving.py measures what the threads cost.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from megatron.core import device
from megatron.core.autograd import ThreadLocal

# Found also by a `yield_to_peer` that is called from a backward pass.
_current: ThreadLocal[_Turns] = ThreadLocal("megatron turns")


class _Stopped(BaseException):
    """Unwinds a pass when the other one has failed.

    A BaseException, since a handler inside the pass may catch Exception.
    """


class _Turns:
    """State of two interleaved passes: which one runs, which have ended, whether one has failed.

    The fields need no lock: only the running pass reads or writes them, and the semaphores order
    its writes before the reads of the other.
    """

    def __init__(self, before_yielding: Callable[[int], None]) -> None:
        self.before_yielding = before_yielding
        self.turns = (threading.Semaphore(0), threading.Semaphore(0))  # released: may run
        self.running = 0  # index of the running pass
        self.has_ended = [False, False]
        self.has_failed = False

    def yield_to_peer(self) -> None:
        me = self.running
        self.before_yielding(me)
        if not self.has_ended[1 - me]:
            self._run_the_other()
            self.await_turn(me)

    def await_turn(self, me: int) -> None:
        self.turns[me].acquire()
        if self.has_failed:
            raise _Stopped

    def _run_the_other(self) -> None:
        self.running = 1 - self.running
        self.turns[self.running].release()

    def run(self, me: int, work: Callable[[], None]) -> None:
        """Run pass ``me`` to its end, then resume the other one.

        If the other pass has ended already, no thread waits for the semaphore.
        """
        _current.set(self)
        is_complete = False
        try:
            if me == 1:
                # A new thread starts on device 0, and with the default stream.
                device.use_in_this_thread()
                self.await_turn(me)
            work()
            is_complete = True
        finally:
            _current.set(None)
            self.has_failed |= not is_complete
            self.has_ended[me] = True
            self._run_the_other()


def interleave(
    first: Callable[[], None],
    second: Callable[[], None],
    before_yielding: Callable[[int], None] = lambda _: None,
) -> None:
    """Run ``first`` in this thread and ``second`` in a new one, one at a time; ``first`` starts.

    ``before_yielding`` is called with 0 (``first``) or 1 (``second``) by the pass that has just
    started a collective, before the other pass resumes.  Raises the first exception of either pass,
    after both have ended.
    """
    turns = _Turns(before_yielding)
    failures: list[BaseException] = []

    def keep(_: object, failure: BaseException | None, __: object) -> bool:
        failures.extend(() if failure is None else [failure])
        return True

    def run_second() -> None:
        with contextlib.ExitStack() as stack:
            stack.push(keep)
            turns.run(1, second)

    # The interpreter does not wait at exit for a daemon, which may hang in a collective.
    thread = threading.Thread(target=run_second, daemon=True)
    thread.start()
    try:
        with contextlib.suppress(_Stopped):  # the second pass has failed
            turns.run(0, first)
    finally:
        thread.join()
    if failures:
        raise failures[0]


def yield_to_peer() -> None:
    """Resume the other pass, if any; called between starting a collective and waiting for it."""
    turns = _current.get()
    if turns is not None:
        turns.yield_to_peer()
