"""Decides about attempts: when one starts, with which workers, when it stops, when the run ends.

One coordinator serves the run, beside the store.  It is a state machine without clock, processes
or communication: `take` gets the events of the workers, `decide` returns what to publish.

    gathering  the living workers are clearing the previous attempt; those that are late are ended
    running    the active workers train; a fault of one of them stops the attempt for all
    ended      the run is over: every worker and its monitor process exit with ``code``

An attempt is stopped at its first fault.  The first cause is the first fault that is not a
consequence: a lost connection, or a wait for another rank, is a consequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.training.fault_tolerance.inprocess.placement import first_placement, next_placement

# Exit codes that no restart cures, unless a blamed rank is excluded: error of the user, rejected
# result, damaged data (see docs/fault_tolerance.md).
FINAL_CODES = (2, 16, 17, 65)
_WITHOUT_PROGRESS = 3  # attempts in a row without a new step after which the run ends

Event = dict[str, Any]


@dataclass(frozen=True)
class Policy:
    """Sizes and times of the --inprocess flags."""

    active: int
    granularity: str
    max_attempts: int | None
    barrier_s: float
    completion_s: float
    last_call_s: float


@dataclass(frozen=True)
class Start:
    """Attempt ``number`` begins; ``active[r]`` is the worker with rank r."""

    number: int
    active: tuple[int, ...]
    text: str  # for the log; empty for the first attempt


@dataclass(frozen=True)
class Stop:
    """The workers leave attempt ``number``."""

    number: int
    text: str


@dataclass(frozen=True)
class Kill:
    """The monitor process of ``worker`` ends it."""

    worker: int


@dataclass(frozen=True)
class End:
    """The run is over."""

    code: int
    text: str


Decision = Start | Stop | Kill | End


@dataclass
class _Fault:
    worker: int
    text: str
    is_primary: bool
    is_stall: bool = False
    code: int = 1  # exit status of the run if no restart cures the fault


@dataclass
class Coordinator:
    """State of the run; ``nodes``: node of each worker."""

    policy: Policy
    nodes: Sequence[str]
    number: int = 0  # of the present or next attempt
    active: list[int] = field(default_factory=list)  # of the present or previous attempt
    lost: set[int] = field(default_factory=set)
    _phase: str = "gathering"
    _since_s: float | None = None  # begin of the phase
    _ready: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _finished_at_s: float = 0.0
    _faults: list[_Fault] = field(default_factory=list)
    _computing: list[_Fault] = field(default_factory=list)  # in no collective at the stop
    _best: int = -1  # last step that any attempt has finished
    _has_excluded: bool = False  # a blamed rank since the last start
    _has_progressed: bool = False  # in the last attempt
    _without_progress: int = 0  # attempts in a row
    _end: End | None = None

    def take(self, event: Event, now_s: float) -> None:
        """Take in an event.

        Keys: ``kind``, ``worker``; ``attempt`` of those of the worker itself; ``text``.
        Kinds: ready (for the attempt), finished, fault (``is_primary``, ``is_stall``, ``step``,
        ``code``: exit status of the error, ``excluded``: ranks to exclude), computing (in no
        collective when the attempt was stopped), dead (also of a lost node), end (``code``: stop
        everything).
        """
        kind = event["kind"]
        worker = event["worker"]
        if kind == "dead":
            self._die(worker, event["text"])
        elif kind == "end":
            self._end = self._end or End(event["code"], self._named(worker, event["text"]))
        elif worker in self.lost or event["attempt"] != self._attempt_of(kind):
            return
        elif kind == "ready":
            self._ready.add(worker)
        elif kind == "finished":
            self._finished_at_s = self._finished_at_s if self._finished else now_s
            self._finished.add(worker)
        elif kind == "fault":
            self._note_step(event.get("step"))
            for rank in event.get("excluded", ()):
                self._has_excluded = True
                self._die(self.active[rank], f"excluded: {event['text']}")
            more = {key: event[key] for key in ("is_stall", "code") if key in event}
            self._faults.append(_Fault(worker, event["text"], event["is_primary"], **more))
        elif kind == "computing":
            self._computing.append(_Fault(worker, event["text"], is_primary=True))

    def _attempt_of(self, kind: str) -> int:
        """Return the attempt whose events of this kind count; faults also count after its stop."""
        has_stopped = self._phase == "gathering"
        return self.number - 1 if has_stopped and kind != "ready" else self.number

    def decide(self, now_s: float) -> list[Decision]:
        """Return the decisions that are due, in order."""
        if self._phase == "ended":
            return []
        if self._since_s is None:
            self._since_s = now_s
        if self._end is not None:
            return [self._finish(self._end)]
        if self._phase == "gathering":
            return self._gather(now_s, now_s - self._since_s)
        return self._watch(now_s)

    def named(self, worker: int) -> str:
        """Return how messages name a worker: its rank in the attempt, or reserve and number."""
        if worker in self.active:
            return f"rank {self.active.index(worker)}"
        return f"reserve {worker}"

    def _named(self, worker: int, text: str) -> str:
        return f"{self.named(worker)} failed: {text}" if text else ""

    def _die(self, worker: int, text: str) -> None:
        if worker in self.lost:
            return
        self.lost.add(worker)
        if worker in self.active:
            self._faults.append(_Fault(worker, text, is_primary=True))

    def _note_step(self, step: int | None) -> None:
        if step is not None and step > self._best:
            self._best = step
            self._has_progressed = True

    def _living(self) -> set[int]:
        return set(range(len(self.nodes))) - self.lost

    def _gather(self, now_s: float, waited_s: float) -> list[Decision]:
        missing = self._living() - self._ready
        if missing and waited_s > self.policy.barrier_s:
            for worker in missing:
                self._die(worker, f"it did not answer within {self.policy.barrier_s:.0f} s")
            return [*(Kill(worker) for worker in sorted(missing)), *self._gather(now_s, waited_s)]
        if missing or (self._faults and waited_s < self.policy.last_call_s):
            return []
        return [self._start(now_s)]

    def _start(self, now_s: float) -> Decision:
        cause = self._cause()
        final = [f.code for f in self._causes() if f.code in FINAL_CODES]
        if final and not self._has_excluded:
            return self._finish(End(final[0], cause))
        if self.number == 0 and not self._faults and not self.lost:
            try:
                after: list[int] | None = first_placement(
                    self.nodes, self.policy.active, self.policy.granularity
                )
            except ValueError as error:
                return self._finish(End(2, f"--inprocess-restart: {error}"))
        else:
            before = self.active or list(range(self.policy.active))
            doubtful = self._blamed() - self.lost
            after = next_placement(before, self.nodes, self.lost, doubtful, self.policy.granularity)
        if after is None:
            return self._finish(End(1, f"{cause}; {self._too_few()}"))
        limit = self.policy.max_attempts
        if limit is not None and self.number >= limit:
            return self._finish(End(1, f"{cause}; --inprocess-max-iterations {limit} is reached"))
        stopped = int(self.number > 0)
        self._without_progress = 0 if self._has_progressed else self._without_progress + stopped
        self._has_progressed = False
        if self._without_progress >= _WITHOUT_PROGRESS:
            text = f"{_WITHOUT_PROGRESS} attempts in a row have finished no new step"
            return self._finish(End(1, f"{cause}; {text}: another restart is pointless"))
        text = self._replaced(after)
        self.active = after
        self._enter("running", now_s)
        self._finished = set()
        self._faults = []
        self._computing = []
        self._has_excluded = False
        return Start(self.number, tuple(after), f"{cause}{text}" if cause else "")

    def _blamed(self) -> set[int]:
        """Return the workers of primary faults, of all faults if there is no primary one."""
        return {fault.worker for fault in self._causes()}

    def _causes(self) -> list[_Fault]:
        """Return the faults that are no consequences, or all if there is none.

        If all faults are ranks that waited too long, the rank that did not wait is the cause.
        """
        primary = [fault for fault in self._faults if fault.is_primary]
        if not primary and self._faults and all(fault.is_stall for fault in self._faults):
            primary = self._computing
        return primary or self._faults

    def _cause(self) -> str:
        found = self._causes()
        return self._named(found[0].worker, found[0].text) if found else ""

    def _replaced(self, after: Sequence[int]) -> str:
        changed = [
            f"reserve {new} becomes rank {rank}"
            for rank, (old, new) in enumerate(zip(self.active, after, strict=False))
            if old != new
        ]
        return "; " + ", ".join([*changed, f"restart {self.number} inside the processes"])

    def _too_few(self) -> str:
        left = len(self._living())
        unit = "" if self.policy.granularity == "rank" else " on complete nodes"
        return (
            f"no reserve is left: {left} of {len(self.nodes)} ranks live and "
            f"--inprocess-active-world-size is {self.policy.active}{unit}"
        )

    def _watch(self, now_s: float) -> list[Decision]:
        late = set(self.active) - self._finished
        if not late and not self._faults:
            return [self._finish(End(0, ""))]
        if not self._faults and self._finished:
            limit_s = self.policy.completion_s
            if now_s - self._finished_at_s > limit_s:
                for worker in sorted(late):
                    text = f"it did not finish within {limit_s:.0f} s after the first rank"
                    self._faults.append(_Fault(worker, text, is_primary=True))
        if not self._faults:
            return []
        stopped = Stop(self.number, self._cause())
        self.number += 1
        self._enter("gathering", now_s)
        return [stopped]

    def _enter(self, phase: str, now_s: float) -> None:
        self._phase = phase
        self._since_s = now_s
        self._ready = set()

    def _finish(self, end: End) -> End:
        self._phase = "ended"
        return end
