"""Adds the transfers between ranks to an order of work.  Pure, the same on every rank.

Sends are rendezvous: one may wait until its receive is posted, and transfers between two ranks
are matched by their order alone.  So all work is laid out on one clock, every pass taking one
unit, and all transfers that become possible at one moment form one wave.  On each rank a wave is
one Exchange, after the work begun before that moment.  A wave needs only work begun earlier and
precedes all work that needs it: executing work and waves in the order of time always advances,
whether an Exchange is completed at once or when its tensors are used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from megatron.core.pipeline_parallel.plan import (
    Exchange,
    Instruction,
    Placement,
    Transfer,
    Work,
)

Pass = tuple[str, int, int]  # kind, micro-batch, virtual stage


@lru_cache(maxsize=16)
def instructions(
    work: Sequence[Sequence[Work]], placement: Placement, *, early: bool = False
) -> list[list[Instruction]]:
    """What each rank does, of the work of all ranks (tuples: the result is cached).

    ``early`` posts receives one pass further ahead in warm-up and flush
    (``--overlap-p2p-communication-warmup-flush``).
    """
    starts = _clock(work, placement, latency=int(early), steady_latency=0)
    # Time for transfers in the steady state costs nothing where the order has slack for it.
    relaxed = _clock(work, placement, latency=int(early), steady_latency=1)
    if max(map(max, relaxed)) == max(map(max, starts)):
        starts = relaxed
    sends, receives = _waves(work, placement, starts)
    return [
        _merge(rank_work, rank_starts, sends[rank], receives[rank])
        for rank, (rank_work, rank_starts) in enumerate(zip(work, starts, strict=True))
    ]


def inputs(passed: Pass, num_stages: int) -> Pass | None:
    """The pass whose output another virtual stage hands to this one."""
    kind, microbatch, stage = passed
    if kind == "forward" and stage > 0:
        return kind, microbatch, stage - 1
    if kind == "backward" and stage < num_stages - 1:
        return kind, microbatch, stage + 1
    return None


def _clock(
    work: Sequence[Sequence[Work]], placement: Placement, *, latency: int, steady_latency: int
) -> list[list[int]]:
    """When each pass starts, if each takes one unit and each hand-over ``latency`` units more.

    ``steady_latency`` is that of the steady state, from the first backward to the last forward.
    """
    ends: dict[Pass, int] = {}
    starts: list[list[int]] = [[] for _ in work]
    waiting: dict[Pass, int] = {}
    runnable = list(range(len(work)))
    steady = [_steady_state(rank_work) for rank_work in work]
    while runnable:
        rank = runnable.pop()
        now = starts[rank][-1] + 1 if starts[rank] else 0
        for index in range(len(starts[rank]), len(work[rank])):
            kind, microbatch, chunk = work[rank][index]
            passed = kind, microbatch, placement.stage(rank, chunk)
            source = inputs(passed, placement.num_stages)
            if source is not None:
                if source not in ends:
                    waiting[source] = rank
                    break
                ahead = steady_latency if index in steady[rank] else latency
                now = max(now, ends[source] + ahead)
            starts[rank].append(now)
            now += 1
            ends[passed] = now
            if (follower := waiting.pop(passed, None)) is not None:
                runnable.append(follower)
    if waiting:
        stuck = {rank: work[rank][len(starts[rank])] for rank in waiting.values()}
        raise ValueError(f"this order of work never ends: rank -> first work it cannot do {stuck}")
    return starts


def _steady_state(work: Sequence[Work]) -> range:
    kinds = [item.kind for item in work]
    first_backward = kinds.index("backward") if "backward" in kinds else len(kinds)
    last_forward = len(kinds) - 1 - kinds[::-1].index("forward")
    return range(first_backward, last_forward + 1)


Waves = list[dict[int, list[Transfer]]]  # of each rank: time -> transfers


def _waves(
    work: Sequence[Sequence[Work]], placement: Placement, starts: list[list[int]]
) -> tuple[Waves, Waves]:
    """Sends and receives of each rank by the moment when they become possible."""
    rank_of = [placement.location(stage)[0] for stage in range(placement.num_stages)]
    sends: Waves = [defaultdict(list) for _ in work]
    receives: Waves = [defaultdict(list) for _ in work]
    for rank, rank_work in enumerate(work):
        for (kind, microbatch, chunk), start in zip(rank_work, starts[rank], strict=True):
            stage = placement.stage(rank, chunk)
            target = {"forward": stage + 1, "backward": stage - 1}.get(kind, -1)
            if not 0 <= target < placement.num_stages:
                continue
            if rank_of[target] == rank:
                continue
            name = "activation" if kind == "forward" else "gradient"
            transfer = Transfer(name, microbatch, stage, target)
            sends[rank][start + 1].append(transfer)
            receives[rank_of[target]][start + 1].append(transfer)
    return sends, receives


def _merge(
    work: Sequence[Work],
    starts: list[int],
    sends: dict[int, list[Transfer]],
    receives: dict[int, list[Transfer]],
) -> list[Instruction]:
    """Work and waves of one rank in the order of time; a wave comes before work of its moment."""
    merged: list[Instruction] = []
    times = iter(sorted(sends.keys() | receives.keys()))
    time = next(times, None)
    for item, start in zip(work, starts, strict=True):
        while time is not None and time <= start:
            merged.append(Exchange(_ordered(sends, time), _ordered(receives, time)))
            time = next(times, None)
        merged.append(item)
    while time is not None:
        merged.append(Exchange(_ordered(sends, time), _ordered(receives, time)))
        time = next(times, None)
    return merged


def _ordered(waves: dict[int, list[Transfer]], time: int) -> tuple[Transfer, ...]:
    """Both sides of a pair list the transfers of a wave alike."""
    return tuple(sorted(waves.get(time, ())))
