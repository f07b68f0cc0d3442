"""Stop signals of the supervisor: the first asks the ranks to save and stop, a second ends them.

The signals are SIGTERM, SIGINT and SIGUSR1, which schedulers send before a time limit or a
preemption, and those of --signals-to-handle.  While no rank runs, a signal raises StopRequested.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from types import FrameType

from megatron.training.process.signals import ECHO_S

_ALWAYS = ("SIGTERM", "SIGINT", "SIGUSR1")


class StopRequested(Exception):  # noqa: N818  not an error
    """A stop signal came while no rank was running."""


class StopSignals:
    """The stop signals that have come."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.is_second = False
        self.has_ranks = False  # else the handler raises
        self._first_at_s = 0.0

    def install(self, names: Iterable[str] = ()) -> None:
        """Install the handler; call it again after torch's agent has installed its own."""
        for name in {*_ALWAYS, *(name.strip() for name in names if name.strip())}:
            signal.signal(signal.Signals[name], self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.first is None:
            self.first = signum
            self._first_at_s = now_s
        elif signum == signal.SIGINT or now_s - self._first_at_s > ECHO_S:
            self.is_second = True
        if not self.has_ranks:
            raise StopRequested
