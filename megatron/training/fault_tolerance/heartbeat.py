"""Heartbeats of ranks, by which other processes find a hang, and the time limits that they compare.

A heartbeat is a small memory-mapped file.  The rank writes with plain memory stores, so the file
also shows the last state of a process that was stopped or killed.  Layout, in native byte order:
`_SLOTS` integers of 8 bytes, then the name of the last collective in UTF-8, padded with zeros.  A
reader may see a half-written name in the microsecond in which it changes, but never in a rank that
hangs.  Times are those of ``time.monotonic_ns``, which all processes of a host share.

A limit is the longest duration of a section in this run times `_FACTOR`, and at least `FLOORS_S`,
so that a slow read of data or a garbage collection in a run of short steps is no hang.  Until
enough durations are known, the limits of `DEFAULTS_S` apply.  The run saves the limits beside its
checkpoints, in the format of NVIDIA's ``RankMonitorClient`` (`STATE_FILE`).
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.config.errors import LaunchError

VARIABLE = "MEGATRON_HEARTBEAT_DIR"  # folder of the files, which the supervisor sets
# Sections of a run.  "" is the time outside of the others; an ended rank has no limit.
SECTIONS = ("", "setup", "step", "checkpointing", "ended")
_MAGIC = 0x4D47_4842_0000_0003  # "MGHB", version 3
_SIZE = 4096
# Slots.  The tracer of collectives writes the last three (`HeartbeatFile.board`).
_MAGIC_SLOT, _PID, _SECTION, _ITERATION = range(4)
_BOARD = 8  # sign_ns, is_in_collective, call: `collective_tracer.Board.slots`
_SLOTS = 11
_NAME_AT = 8 * _SLOTS
_NAME_BYTES = 160
_PREFIX = "rank_"
STATE_FILE = "ft_state.json"
OUT_OF_SECTION = ""
SECTIONS_WITH_LIMIT = ("setup", "step", "checkpointing", OUT_OF_SECTION)
_Table = Mapping[str, float]
DEFAULTS_S: _Table = dict(zip(SECTIONS_WITH_LIMIT, (1800.0, 900.0, 1800.0, 900.0), strict=True))
FLOORS_S: _Table = dict(zip(SECTIONS_WITH_LIMIT, (120.0, 30.0, 120.0, 60.0), strict=True))
# Durations after which a limit is learned.  The first save of a run may be its shortest.
MIN_COUNTS: _Table = dict(zip(SECTIONS_WITH_LIMIT, (1, 16, 2, 16), strict=True))
_FACTOR = 5.0


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """State of a rank as its file shows it."""

    rank: int
    pid: int
    section: str
    iteration: int
    sign_ns: int  # last begin or end of a section or a collective
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
        if folder is None:
            self._map = mmap.mmap(-1, _SIZE)
            self._fill()
            return
        path = Path(folder) / f"{_PREFIX}{rank}"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._map = _map_file(partial)
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

    def begin(self, section: str) -> None:
        """Enter ``section``; "" leaves the current one."""
        self._slots[_SECTION] = SECTIONS.index(section)
        self._slots[_BOARD] = time.monotonic_ns()

    def at_iteration(self, iteration: int | None) -> None:
        """Set the number of the step in progress; None: the next one."""
        self._slots[_ITERATION] = self._slots[_ITERATION] + 1 if iteration is None else iteration


def _map_file(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(file, 0, _SIZE)  # else a store into a full tmpfs would raise SIGBUS
        return mmap.mmap(file, _SIZE)
    finally:
        os.close(file)


def read_heartbeats(folder: str | os.PathLike[str]) -> list[Heartbeat]:
    """Return the heartbeats in ``folder``, in the order of ranks.

    Skips files that are not complete.  The processes may have ended.
    """
    found: list[Heartbeat] = []
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            rank = path.name.removeprefix(_PREFIX)
            if path.name.startswith(_PREFIX) and rank.isascii() and rank.isdigit():
                with contextlib.suppress(OSError):
                    found += _parse(int(rank), path.read_bytes())
    return sorted(found, key=lambda heartbeat: heartbeat.rank)


def is_stopped(pid: int) -> bool:
    """Return whether a local process is stopped (SIGSTOP or a debugger)."""
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _parse(rank: int, data: bytes) -> list[Heartbeat]:
    if len(data) != _SIZE:
        return []
    slots = struct.unpack_from(f"={_SLOTS}q", data)
    if slots[_MAGIC_SLOT] != _MAGIC or not 0 <= slots[_SECTION] < len(SECTIONS):
        return []
    sign_ns, is_inside, call = slots[_BOARD:]
    name = data[_NAME_AT : _NAME_AT + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
    return [
        Heartbeat(
            rank=rank,
            pid=slots[_PID],
            section=SECTIONS[slots[_SECTION]],
            iteration=slots[_ITERATION],
            sign_ns=sign_ns,
            is_in_collective=bool(is_inside),
            collective=f"{name}, call {call}" if name else "",
        )
    ]


@dataclass(frozen=True)
class Hang:
    """A rank that gave no sign for longer than the limit of its section."""

    heartbeat: Heartbeat
    waited_s: float
    limit_s: float

    def __str__(self) -> str:
        beat = self.heartbeat
        where = f"in section {beat.section}" if beat.section else "outside of all sections"
        return (
            f"{beat} (no sign for {self.waited_s:.0f} s {where} of iteration {beat.iteration}, "
            f"the limit is {self.limit_s:.0f} s)"
        )


@dataclass(frozen=True)
class Limits:
    """Limits in seconds by section; `OUT_OF_SECTION` is the limit between sections."""

    learned: Mapping[str, float] = field(default_factory=dict)  # in place of `DEFAULTS_S`

    def limit_s(self, section: str) -> float:
        """Return the limit of ``section``; an ended rank has none."""
        return self.learned.get(section, DEFAULTS_S.get(section, math.inf))

    def verdict(self, heartbeat: Heartbeat, now_ns: int) -> Hang | None:
        """Return the hang of the rank if it gave no sign for the limit of its section, else None.

        A slow step whose collectives progress is no hang.
        """
        limit_s = self.limit_s(heartbeat.section)
        waited_s = (now_ns - heartbeat.sign_ns) / 1e9
        return Hang(heartbeat, waited_s, limit_s) if waited_s > limit_s else None

    def merged(self, seen: Durations) -> Limits:
        """Return limits that also fit the durations ``seen``.

        A limit that was learned before rises at once and falls by half the difference, so that one
        outlier does not raise it for all later runs.
        """
        learned = dict(self.learned)
        for section in seen.known():
            wanted = max(FLOORS_S[section], _FACTOR * seen.longest_s[section])
            learned[section] = max(wanted, (wanted + learned.get(section, wanted)) / 2)
        return Limits(learned)

    def to_state(self, before: Mapping[str, float | None] | None = None) -> dict[str, Any]:
        """Return the content of the state file.

        A limit that was not learned is that of ``before``, or null.
        """
        limits = {**dict.fromkeys(SECTIONS_WITH_LIMIT), **(before or {}), **self.learned}
        out_of_section = limits.pop(OUT_OF_SECTION)
        section = {
            "section": limits,
            "out_of_section": out_of_section,
            "calculated_sections": sorted({*self.learned} - {OUT_OF_SECTION}),
            "is_out_of_section_calculated": OUT_OF_SECTION in self.learned,
        }
        return {"current_timeouts": {"section": section}}

    @classmethod
    def from_state(cls, state: object) -> Limits:
        """Return the limits of a state file; invalid entries get the default."""
        timeouts = _mapping(_mapping(state).get("current_timeouts"))
        saved = _mapping(timeouts.get("section"))
        found = {**_mapping(saved.get("section")), OUT_OF_SECTION: saved.get("out_of_section")}
        return cls(
            {
                name: float(value)
                for name, value in found.items()
                if name in SECTIONS_WITH_LIMIT
                and isinstance(value, int | float)
                and math.isfinite(value)
                and value > 0
            }
        )

    def save(self, path: Path) -> None:
        """Replace the file at once, or leave the old one: a log must not end the run.

        The caller reports an OSError.
        """
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.to_state(), indent=1))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Limits:
        """Return the limits in the file; the defaults if there is none or it is damaged."""
        with contextlib.suppress(OSError, ValueError):
            return cls.from_state(json.loads(path.read_text()))
        return cls()


@dataclass
class Durations:
    """Longest duration and number of durations of each section in this run."""

    longest_s: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, section: str, seconds: float) -> None:
        """Take one duration into account."""
        self.longest_s[section] = max(seconds, self.longest_s.get(section, 0.0))
        self.counts[section] = self.counts.get(section, 0) + 1

    def known(self) -> list[str]:
        """Return the sections of which enough durations were seen."""
        return [
            name for name in SECTIONS_WITH_LIMIT if self.counts.get(name, 0) >= MIN_COUNTS[name]
        ]


class HangWatch:
    """Find hangs in heartbeats that are polled.

    A hang counts once two polls have found it: after a pause of the host itself, every rank looks
    silent at the first poll.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, int] = {}  # rank -> its last sign

    def poll(self, heartbeats: Iterable[Heartbeat], limits: Limits, now_ns: int) -> list[Hang]:
        """Return the confirmed hangs."""
        hangs = [h for beat in heartbeats if (h := limits.verdict(beat, now_ns)) is not None]
        known = self._suspects
        self._suspects = {hang.heartbeat.rank: hang.heartbeat.sign_ns for hang in hangs}
        return [h for h in hangs if known.get(h.heartbeat.rank) == h.heartbeat.sign_ns]


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
