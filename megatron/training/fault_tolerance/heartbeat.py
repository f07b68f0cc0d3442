"""Heartbeat of a rank: a small memory-mapped file that other processes read to find a hang.

The rank writes with plain memory stores, so the file also shows the last state of a process that
was stopped or killed.  Layout, in native byte order: `_SLOTS` integers of 8 bytes, then the name of
the last collective in UTF-8, padded with zeros.  A reader may see a half-written name in the
microsecond in which it changes, but never in a rank that hangs.

Times are those of ``time.monotonic_ns``, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import LaunchError

VARIABLE = "MEGATRON_HEARTBEAT_DIR"  # folder of the files, which the supervisor sets
# Sections of a run.  "" is the time outside of the others; an ended rank has no limit.
SECTIONS = ("", "setup", "step", "checkpointing", "ended")
_MAGIC = 0x4D47_4842_0000_0001  # "MGHB", version 1
_SIZE = 4096
# Slots.  The tracer of collectives writes the last four (`HeartbeatFile.board`).
_MAGIC_SLOT, _PID, _SECTION, _SINCE_NS, _ITERATION = range(5)
_BOARD = 8  # sign_ns, progress, is_in_collective, call: `collective_tracer.Board.slots`
_SLOTS = 12
_NAME_AT = 8 * _SLOTS
_NAME_BYTES = 160
_PREFIX = "rank_"


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """State of a rank as its file shows it."""

    rank: int
    pid: int
    section: str
    since_ns: int  # begin of the section
    iteration: int
    sign_ns: int  # last begin or end of a section or a collective
    progress: int  # number of collectives started plus waits completed
    is_in_collective: bool
    collective: str  # the last one that was started, with its call number; "" if there was none

    def __str__(self) -> str:
        verb = "waits in" if self.is_in_collective else "is in no collective; the last was"
        doing = f"{verb} {self.collective}" if self.collective else "has started no collective"
        return f"rank {self.rank} (process {self.pid}) {doing}"


class HeartbeatFile:
    """Heartbeat file of this rank.

    ``board`` and ``name`` are the parts that the tracer of collectives writes.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, rank: int) -> None:
        """Create the file, in section setup; without ``folder`` in memory of this process only.

        Raises LaunchError if it cannot be written.
        """
        self._rank = rank
        if folder is None:
            self._map = mmap.mmap(-1, _SIZE)
            self._fill()
            return
        path = Path(folder) / f"{_PREFIX}{rank}"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._map = _mapped(partial)
            self._fill()
            partial.rename(path)  # a reader sees a complete file, or that of the process before
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise LaunchError(
                f"environment variable {VARIABLE}={folder}: cannot write the heartbeat of rank "
                f"{rank} ({error.strerror}); unset it, or create the folder in /dev/shm"
            ) from error

    def _fill(self) -> None:
        whole = memoryview(self._map)
        self._slots: memoryview[int] = whole[: 8 * _SLOTS].cast("q")
        self.board: memoryview[int] = whole[8 * _BOARD : _NAME_AT].cast("q")
        self.name = whole[_NAME_AT : _NAME_AT + _NAME_BYTES]
        self._slots[_PID] = os.getpid()
        self._slots[_MAGIC_SLOT] = _MAGIC
        self.begin("setup")

    def read(self) -> Heartbeat:
        """Return the current content."""
        return _parsed(self._rank, self._map[:])[0]

    def begin(self, section: str) -> None:
        """Enter ``section``; "" leaves the current one."""
        self._slots[_SECTION] = SECTIONS.index(section)
        self._slots[_SINCE_NS] = self._slots[_BOARD] = time.monotonic_ns()

    def at_iteration(self, iteration: int) -> None:
        """Set the number of the step in progress."""
        self._slots[_ITERATION] = iteration


def _mapped(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(file, 0, _SIZE)  # else a store into a full tmpfs would raise SIGBUS
        return mmap.mmap(file, _SIZE)
    finally:
        os.close(file)


def read_heartbeats(folder: str | os.PathLike[str]) -> list[Heartbeat]:
    """Return the heartbeats in ``folder``, in the order of ranks.

    Skips files that are not complete.  The processes may have ended: see `process_state`.
    """
    found: list[Heartbeat] = []
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            rank = path.name.removeprefix(_PREFIX)
            if path.name.startswith(_PREFIX) and rank.isascii() and rank.isdigit():
                with contextlib.suppress(OSError):
                    found += _parsed(int(rank), path.read_bytes())
    return sorted(found, key=lambda heartbeat: heartbeat.rank)


def process_state(pid: int) -> str:
    """Return ``running``, ``stopped`` (SIGSTOP or a debugger) or ``ended`` of a local process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "ended"
    letter = text.rpartition(")")[2].split()[0]
    return {"T": "stopped", "t": "stopped", "Z": "ended", "X": "ended"}.get(letter, "running")


def _parsed(rank: int, data: bytes) -> list[Heartbeat]:
    if len(data) != _SIZE:
        return []
    slots = struct.unpack_from(f"={_SLOTS}q", data)
    if slots[_MAGIC_SLOT] != _MAGIC or not 0 <= slots[_SECTION] < len(SECTIONS):
        return []
    sign_ns, progress, is_inside, call = slots[_BOARD:]
    name = data[_NAME_AT : _NAME_AT + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
    return [
        Heartbeat(
            rank=rank,
            pid=slots[_PID],
            section=SECTIONS[slots[_SECTION]],
            since_ns=slots[_SINCE_NS],
            iteration=slots[_ITERATION],
            sign_ns=max(sign_ns, slots[_SINCE_NS]),
            progress=progress,
            is_in_collective=bool(is_inside),
            collective=f"{name}, call {call}" if name else "",
        )
    ]
