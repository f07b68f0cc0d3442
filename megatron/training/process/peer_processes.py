"""Which neighbouring rank on this host has ended.

A process that is killed writes nothing.  Each rank announces its process and watches those of the
two ranks beside it where they run under the same kernel, so that of several ranks on a host every
one is watched.  A process file descriptor also notices an end that the launcher has not seen yet.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

from megatron.core.parallel.run_store import RunStore

_PROCESS = "process/"  # + rank: where it runs, and its process id
_LEFT = "left/"  # + rank: it has ended in order


class PeerProcesses:
    """The processes of the ranks beside ``rank``; none where the system has no descriptors."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._unknown = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}
        self._open: dict[int, int] = {}  # rank -> process file descriptor
        self._processes: dict[int, int] = {}  # rank -> process id
        self._place = _place()

    def announce(self, store: RunStore) -> None:
        """Say where this rank runs."""
        store.set(f"{_PROCESS}{self._rank}", f"{self._place} {os.getpid()}")

    def leave(self, store: RunStore) -> None:
        """Say that this rank ends in order."""
        store.set(f"{_LEFT}{self._rank}", "")

    def lost(self, store: RunStore) -> tuple[int, int] | None:
        """Rank and process id of a neighbour that has ended and has not left; None for none."""
        for rank in sorted(self._unknown):
            self._begin_to_watch(rank, store.get(f"{_PROCESS}{rank}"))
        for rank in self._processes:
            if self._has_ended(rank) and store.get(f"{_LEFT}{rank}") is None:
                return rank, self._processes[rank]
        return None

    def _begin_to_watch(self, rank: int, announced: str | None) -> None:
        if announced is None:
            return
        self._unknown.remove(rank)
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
    """What two processes share that can see each other; empty where that cannot be told."""
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
