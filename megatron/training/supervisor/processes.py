"""Processes of this node's ranks: how they end, and how they are ended.

A rank is started as the leader of its own session, so its process group contains its data loader
workers and checkpoint writers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

_TERM_S = 5.0  # between SIGTERM and SIGKILL
_POLL_S = 0.05


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is needed."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""


@dataclass(frozen=True)
class End:
    """Exit status and time of an ended process; ``was_ended``: by this object."""

    code: int
    at_s: float  # time.time()
    was_ended: bool


class RankProcesses:
    """The processes of a node's ranks, by global rank."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = dict(processes)
        self._sent: set[int] = set()  # ranks that were sent a final signal
        self.ends: dict[int, End] = {}

    def poll(self) -> None:
        """Record the processes that have ended."""
        for rank in self.running():
            code = self._processes[rank].poll()
            if code is not None:
                self.ends[rank] = End(code, time.time(), rank in self._sent)

    def running(self) -> list[int]:
        """Return the ranks that have not ended, as of the last `poll`."""
        return [rank for rank in self._processes if rank not in self.ends]

    @property
    def has_failure(self) -> bool:
        """Whether a rank ended with another exit status than 0."""
        return any(end.code != 0 for end in self.ends.values())

    def send(self, signum: int, ranks: Iterable[int] | None = None) -> None:
        """Send ``signum`` to the running ranks, or those of ``ranks``; not to their children."""
        for rank in self.running() if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signum)

    def kill(self, rank: int) -> None:
        """End a rank and its children at once."""
        if rank not in self.ends:
            self._sent.add(rank)
            self._signal_group(rank, signal.SIGKILL)

    def end(self, patience_s: float, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Wait ``patience_s`` for the ranks to end by themselves, then end them.

        A rank that its failure watch ends finishes its pending save first.  The wait
        ends when ``may_go_on`` returns False.
        """
        self._wait(patience_s, may_go_on)
        if may_go_on():
            self._sent.update(self.running())
            for rank in self.running():
                self._signal_group(rank, signal.SIGTERM)
            self._wait(_TERM_S, may_go_on)
        for rank in self.running():
            self.kill(rank)
        self._wait(_TERM_S, lambda: True)
        for rank in self._processes:  # what a rank has left in its group
            self._signal_group(rank, signal.SIGKILL)

    def _wait(self, patience_s: float, may_go_on: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + patience_s
        self.poll()
        while self.running() and time.monotonic() < deadline_s and may_go_on():
            time.sleep(_POLL_S)
            self.poll()

    def _signal_group(self, rank: int, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._processes[rank].pid, signum)
