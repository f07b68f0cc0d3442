"""The ranks watch each other where no other process does (--enable-ft-package under torchrun).

A rank that has given no sign for longer than its limit calls the roll: every rank answers with its
heartbeat through the store.  The rank that hangs is the one that does not answer (its process is
stopped), else the one that the others wait for (`likely_cause`).  All of it happens in the thread
of `failure_watch`, which then ends all ranks; without a call, a poll is one look into the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict

from megatron.core.parallel.run_store import RunStore
from megatron.training.fault_tolerance.heartbeat import Heartbeat
from megatron.training.fault_tolerance.limits import HangWatch, Limits, likely_cause
from megatron.training.process.stall_report import HungRank

_CALLED = "peer_monitor/called"  # rank that has called the roll, last
_ANSWER = "peer_monitor/answer"  # + rank
_PATIENCE_POLLS = 4  # within which a rank must answer


class PeerMonitor:
    """Roll call of ranks; `look` is called at each poll of the watching thread."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        heartbeat: Callable[[], Heartbeat],
        limits: Callable[[], Limits],
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._heartbeat = heartbeat
        self._limits = limits
        self._watch = HangWatch()
        self._polls_since_call: int | None = None
        self._old_answers: list[str | None] = []

    def look(self, store: RunStore) -> HungRank | None:
        """Answer a roll call, or call one if this rank is late; return the rank that hangs."""
        now_ns = time.monotonic_ns()
        mine = self._heartbeat()
        is_late = bool(self._watch.poll([mine], self._limits(), now_ns))
        if is_late and self._polls_since_call is None:
            self._old_answers = self._answers(store)
            store.set(_CALLED, str(self._rank))
            self._polls_since_call = 0
        if store.get(_CALLED) is not None:
            answer = json.dumps([now_ns - mine.sign_ns, asdict(mine)])
            store.set(f"{_ANSWER}{self._rank}", answer)
        if not is_late:
            self._polls_since_call = None
        elif self._polls_since_call is not None:
            self._polls_since_call += 1
            if self._polls_since_call > _PATIENCE_POLLS:
                return self._found(store)
        return None

    def _answers(self, store: RunStore) -> list[str | None]:
        return [store.get(f"{_ANSWER}{rank}") for rank in range(self._world_size)]

    def _found(self, store: RunStore) -> HungRank:
        limit_s = self._limits().seconds[self._heartbeat().section]
        answers: list[Heartbeat] = []
        for rank, answer in enumerate(self._answers(store)):
            if answer is None or answer == self._old_answers[rank]:
                why = (
                    "its process is stopped, or its host is lost: not even its watching thread "
                    f"answers; {self._heartbeat()}, longer than the limit of {limit_s:.0f} s"
                )
                return HungRank(rank, why, is_stopped=True)
            silent_ns, fields = json.loads(answer)
            # Clocks of hosts differ: compare ages, not times.
            answers.append(Heartbeat(**{**fields, "sign_ns": -silent_ns}))
        beat = min(answers, key=likely_cause)
        return HungRank(
            beat.rank,
            f"it hangs in section {beat.section or 'none'} of iteration {beat.iteration}: no sign "
            f"for {-beat.sign_ns / 1e9:.0f} s, the limit is {limit_s:.0f} s; {beat}",
        )
