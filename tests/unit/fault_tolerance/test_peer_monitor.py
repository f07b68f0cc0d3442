"""Ranks that watch each other find the one that hangs."""

from __future__ import annotations

import time
from dataclasses import replace

import torch.distributed as dist

from megatron.core.parallel.run_store import RunStore
from megatron.training.fault_tolerance.failure_watch import HungRank, PeerMonitor
from megatron.training.fault_tolerance.heartbeat import Heartbeat, Limits
from tests.unit.fault_tolerance.test_limits import BEAT, ns

LIMITS = Limits({"step": 30.0})


class Ranks:
    """Ranks of one process, each with a heartbeat that the test sets."""

    def __init__(self, silent_s: list[float], inside: list[bool]) -> None:
        self.store = RunStore(dist.HashStore(), b"secret")
        now_ns = time.monotonic_ns()
        self.beats = [
            replace(BEAT, rank=rank, sign_ns=now_ns - ns(seconds), is_in_collective=is_inside)
            for rank, (seconds, is_inside) in enumerate(zip(silent_s, inside, strict=True))
        ]
        self.monitors = [
            PeerMonitor(rank, len(inside), lambda rank=rank: self.beats[rank], lambda: LIMITS)  # type: ignore[misc]
            for rank in range(len(inside))
        ]

    def poll(self, times: int, but: int | None = None) -> list[HungRank]:
        """Poll ``times``, every rank but one; return what was found in the last round."""
        found: list[HungRank | None] = []
        for _ in range(times):
            found = [
                monitor.poll(self.store)
                for rank, monitor in enumerate(self.monitors)
                if rank != but
            ]
        return [hung for hung in found if hung is not None]

    def move(self, beat: Heartbeat) -> None:
        self.beats[beat.rank] = replace(beat, sign_ns=time.monotonic_ns())


def test_the_rank_in_no_collective_is_the_one_that_hangs() -> None:
    ranks = Ranks([40, 45, 41], [True, False, True])
    assert ranks.poll(5) == []
    hung = ranks.poll(1)[0]
    assert (hung.rank, hung.is_stopped) == (1, False)
    assert "it hangs in section step of iteration 12: no sign for 45 s, the limit is 30" in hung.why
    assert "is in no collective; the last was tp all_reduce of ranks 0 1, call 9" in hung.why


def test_without_a_difference_the_oldest_sign_is_named() -> None:
    assert Ranks([40, 41, 45], [True] * 3).poll(6)[0].rank == 2


def test_a_rank_that_does_not_answer_is_stopped() -> None:
    ranks = Ranks([40, 1, 41], [True, False, True])
    hung = ranks.poll(6, but=1)[0]
    assert (hung.rank, hung.is_stopped) == (1, True)
    assert hung.why.startswith("its process is stopped, or its host is lost: not even")
    assert "rank 0 (process 42) waits in tp all_reduce of ranks 0 1, call 9" in hung.why


def test_an_answer_to_an_earlier_call_is_not_taken_for_a_sign_of_life() -> None:
    ranks = Ranks([40, 1, 41], [True, False, True])
    assert ranks.poll(3) == []
    for beat in ranks.beats:
        ranks.move(beat)
    assert ranks.poll(3) == [], "all move again"
    for rank in (0, 2):
        ranks.beats[rank] = replace(ranks.beats[rank], sign_ns=time.monotonic_ns() - ns(40))
    assert ranks.poll(6, but=1)[0].rank == 1


def test_ranks_within_their_limits_call_no_roll() -> None:
    ranks = Ranks([29, 20, 0], [True, False, True])
    assert ranks.poll(20) == []
    assert ranks.store.get("peer_monitor/called") is None
