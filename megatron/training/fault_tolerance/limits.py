"""Time limits of the sections of a run: learnt from its durations, saved beside its checkpoints.

A limit is the longest duration seen times `_FACTOR`, and at least `FLOORS_S`, so that a slow read
of data or a garbage collection in a run of short steps is no hang.  Until enough was seen, the
limits of `DEFAULTS_S` apply.  The file has the format of NVIDIA's ``RankMonitorClient``, which
reads and writes the same one (`STATE_FILE`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.training.fault_tolerance.heartbeat import Heartbeat

STATE_FILE = "ft_state.json"
OUT_OF_SECTION = ""
LEARNT = ("setup", "step", "checkpointing", OUT_OF_SECTION)
_Table = Mapping[str, float]
DEFAULTS_S: _Table = dict(zip(LEARNT, (1800.0, 900.0, 1800.0, 900.0), strict=True))
FLOORS_S: _Table = dict(zip(LEARNT, (120.0, 30.0, 120.0, 60.0), strict=True))
# Durations after which a limit is learnt.  The first save of a run may be its shortest.
MIN_COUNTS: _Table = dict(zip(LEARNT, (1, 16, 2, 16), strict=True))
_FACTOR = 5.0


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

    seconds: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULTS_S))
    learnt: frozenset[str] = frozenset()

    def verdict(self, heartbeat: Heartbeat, now_ns: int) -> Hang | None:
        """Return the hang of the rank if it gave no sign for the limit of its section, else None.

        A slow step whose collectives progress is no hang.  An ended rank has no limit.
        """
        limit_s = self.seconds.get(heartbeat.section, math.inf)
        waited_s = (now_ns - heartbeat.sign_ns) / 1e9
        return Hang(heartbeat, waited_s, limit_s) if waited_s > limit_s else None

    def merged(self, seen: Durations) -> Limits:
        """Return limits that also fit the durations ``seen``.

        A limit that was learnt before rises at once and falls by half the difference, so that one
        outlier does not raise it for all later runs.
        """
        seconds = dict(self.seconds)
        learnt = set(self.learnt)
        for section in seen.known():
            wanted = max(FLOORS_S[section], _FACTOR * seen.longest_s[section])
            before = seconds[section]
            falls = section in learnt and wanted < before
            seconds[section] = (wanted + before) / 2 if falls else wanted
            learnt.add(section)
        return replace(self, seconds=seconds, learnt=frozenset(learnt))

    def learnt_s(self) -> dict[str, float]:
        """Return the limits that were learnt."""
        return {name: self.seconds[name] for name in LEARNT if name in self.learnt}

    def updated(self, newer: Limits) -> Limits:
        """Return these limits with those that ``newer`` has learnt in their place."""
        learnt = {name: newer.seconds[name] for name in newer.learnt}
        return Limits({**self.seconds, **learnt}, self.learnt | newer.learnt)

    def to_state(self) -> dict[str, object]:
        """Return the content of the state file; limits that were not learnt are null."""
        learnt = self.learnt_s()
        section: dict[str, object] = {
            "section": {name: learnt.get(name) for name in LEARNT if name != OUT_OF_SECTION},
            "out_of_section": learnt.get(OUT_OF_SECTION),
            "calculated_sections": sorted(self.learnt - {OUT_OF_SECTION}),
            "is_out_of_section_calculated": OUT_OF_SECTION in learnt,
        }
        return {"current_timeouts": {"section": section}}

    @classmethod
    def from_state(cls, state: object) -> Limits:
        """Return the limits of a state file; invalid entries get the default."""
        timeouts = _mapping(_mapping(state).get("current_timeouts"))
        saved = _mapping(timeouts.get("section"))
        found = {k: v for k, v in _mapping(saved.get("section")).items() if k in LEARNT and k}
        found[OUT_OF_SECTION] = saved.get("out_of_section")
        learnt = {
            name: float(value)
            for name, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value) and value > 0
        }
        return cls({**DEFAULTS_S, **learnt}, frozenset(learnt))

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
        return [name for name in LEARNT if self.counts.get(name, 0) >= MIN_COUNTS[name]]


class HangWatch:
    """Find hangs in heartbeats that are polled.

    A hang counts once two polls have found it: after a pause of the host itself, every rank looks
    silent at the first poll.
    """

    def __init__(self) -> None:
        self._suspects: dict[int, int] = {}  # rank -> its last sign

    def poll(self, heartbeats: Iterable[Heartbeat], limits: Limits, now_ns: int) -> list[Hang]:
        """Return the confirmed hangs, the likely cause first (see `likely_cause`)."""
        hangs = [h for beat in heartbeats if (h := limits.verdict(beat, now_ns)) is not None]
        known = self._suspects
        self._suspects = {hang.heartbeat.rank: hang.heartbeat.sign_ns for hang in hangs}
        return sorted(
            (h for h in hangs if known.get(h.heartbeat.rank) == h.heartbeat.sign_ns),
            key=lambda hang: likely_cause(hang.heartbeat),
        )


def likely_cause(heartbeat: Heartbeat, is_stopped: bool = False) -> tuple[bool, bool, int]:
    """Return a sort key of hanging ranks: the rank that the others wait for comes first.

    That is a rank whose process is stopped, then one in no collective, then the one whose last sign
    is oldest.
    """
    return (not is_stopped, heartbeat.is_in_collective, heartbeat.sign_ns)


def _mapping(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}
