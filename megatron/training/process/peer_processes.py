"""Detect that a neighbouring rank on this host has ended.

A killed process reports nothing.  Each rank publishes its process id and watches the processes of
the previous and the next rank if they run under the same kernel, so that each of several ranks on a
host is watched.  A process file descriptor also shows an end that the launcher has not yet noticed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

from megatron.core.parallel.run_store import RunStore

_PROCESS = "process/"  # + rank: its `_place` and process id
_LEFT = "left/"  # + rank: exists once it has ended normally


class PeerProcesses:
    """Watch the processes of the previous and the next rank.

    Watches none where the system has no process file descriptors.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._unknown = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}
        self._open: dict[int, int] = {}  # rank -> process file descriptor
        self._processes: dict[int, int] = {}  # rank -> process id
        self._place = _place()

    def announce(self, store: RunStore) -> None:
        """Publish this rank's `_place` and process id in the store."""
        store.set(f"{_PROCESS}{self._rank}", f"{self._place} {os.getpid()}")

    def leave(self, store: RunStore) -> None:
        """Record in the store that this rank ends normally."""
        store.set(f"{_LEFT}{self._rank}", "")

    def lost(self, store: RunStore) -> tuple[int, int] | None:
        """Return rank and process id of a neighbour that ended without `leave`, or None."""
        for rank in sorted(self._unknown):
            self._begin_to_watch(rank, store.get(f"{_PROCESS}{rank}"))
        for rank in tuple(self._processes):
            if self._has_ended(rank) and store.get(f"{_LEFT}{rank}") is None:
                return rank, self._processes[rank]
        return None

    def kill(self, rank: int) -> None:
        """Kill the process of ``rank`` if it is a neighbour: a stopped one ignores its launcher."""
        if rank in self._open:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._open[rank], signal.SIGKILL)

    def _begin_to_watch(self, rank: int, announced: str | None) -> None:
        if announced is None:
            return
        self._unknown.discard(rank)  # two threads may look
        place, process = announced.rsplit(" ", 1)
        if place != self._place or place == "":
            return
        try:
            self._open[rank] = os.pidfd_open(int(process))
        except ProcessLookupError:  # it has ended since
            pass
        except OSError:  # an older kernel, or a limit on descriptors
            return
        self._processes[rank] = int(process)

    def _has_ended(self, rank: int) -> bool:
        if rank not in self._open:
            return True
        poll = select.poll()
        poll.register(self._open[rank], select.POLLIN)
        return bool(poll.poll(0))


def _place() -> str:
    """Return an id of this kernel and process namespace; empty if it cannot be determined.

    Processes with equal ids can open file descriptors of each other.
    """
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
