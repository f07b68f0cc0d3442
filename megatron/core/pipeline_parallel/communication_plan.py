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
from functools import lru_cache, partial

from megatron.core.pipeline_parallel.plan import (
    Exchange,
    Instruction,
    Placement,
    Transfer,
    Work,
    is_pair,
)

Pass = tuple[str, int, int]  # kind, micro-batch, virtual stage
Times = tuple[int, int]  # start and end of a pass


@lru_cache(maxsize=16)
def instructions(
    work: Sequence[Sequence[Work]],
    placement: Placement,
    *,
    early: bool = False,
    in_pairs: bool = False,
) -> list[list[Instruction]]:
    """What each rank does, of the work of all ranks (tuples: the result is cached).

    ``early`` posts receives one pass further ahead in warm-up and flush
    (``--overlap-p2p-communication-warmup-flush``).  ``in_pairs``: no transfer comes between the
    passes of a pair.
    """
    clock = partial(_clock, work, placement, latency=int(early), in_pairs=in_pairs)
    times = clock(steady_latency=0)
    # Time for transfers in the steady state costs nothing where the order has slack for it.
    relaxed = clock(steady_latency=1)
    if max(map(max, relaxed)) == max(map(max, times)):
        times = relaxed
    sends, receives = _waves(work, placement, times)
    return [
        _merge(rank_work, rank_times, sends[rank], receives[rank])
        for rank, (rank_work, rank_times) in enumerate(zip(work, times, strict=True))
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
    work: Sequence[Sequence[Work]],
    placement: Placement,
    *,
    latency: int,
    steady_latency: int,
    in_pairs: bool,
) -> list[list[Times]]:
    """When each pass starts and ends, if each takes one unit and each hand-over ``latency`` more.

    ``steady_latency`` is that of the steady state, from the first backward to the last forward.
    The passes of a pair start and end together, after two units.
    """
    ends: dict[Pass, int] = {}
    times: list[list[Times]] = [[] for _ in work]
    waiting: dict[Pass, int] = {}
    runnable = list(range(len(work)))
    steady = [_steady_state(rank_work) for rank_work in work]
    while runnable:
        rank = runnable.pop()
        now = times[rank][-1][1] if times[rank] else 0
        while (index := len(times[rank])) < len(work[rank]):
            together = work[rank][index : index + 2]
            has_pairs = in_pairs and bool(steady[rank])  # else no forward is left for a backward
            if not (has_pairs and len(together) == 2 and is_pair(*together)):
                together = together[:1]
            passes = [(kind, m, placement.stage(rank, chunk)) for kind, m, chunk in together]
            needed = [s for p in passes if (s := inputs(p, placement.num_stages)) is not None]
            absent = [source for source in needed if source not in ends]
            if absent:
                waiting[absent[0]] = rank
                break
            ahead = steady_latency if index in steady[rank] else latency
            now = max([now, *(ends[source] + ahead for source in needed)])
            end = now + len(together)
            for passed in passes:
                times[rank].append((now, end))
                ends[passed] = end
                if (follower := waiting.pop(passed, None)) is not None:
                    runnable.append(follower)
            now = end
    if waiting:
        stuck = {rank: work[rank][len(times[rank])] for rank in waiting.values()}
        raise ValueError(f"this order of work never ends: rank -> first work it cannot do {stuck}")
    return times


def _steady_state(work: Sequence[Work]) -> range:
    kinds = [item.kind for item in work]
    first_backward = kinds.index("backward") if "backward" in kinds else len(kinds)
    last_forward = len(kinds) - 1 - kinds[::-1].index("forward")
    return range(first_backward, last_forward + 1)


Waves = list[dict[int, list[Transfer]]]  # of each rank: time -> transfers


def _waves(
    work: Sequence[Sequence[Work]], placement: Placement, times: list[list[Times]]
) -> tuple[Waves, Waves]:
    """Sends and receives of each rank by the moment when they become possible."""
    rank_of = [placement.location(stage)[0] for stage in range(placement.num_stages)]
    sends: Waves = [defaultdict(list) for _ in work]
    receives: Waves = [defaultdict(list) for _ in work]
    for rank, rank_work in enumerate(work):
        for (kind, microbatch, chunk), (_, end) in zip(rank_work, times[rank], strict=True):
            stage = placement.stage(rank, chunk)
            target = {"forward": stage + 1, "backward": stage - 1}.get(kind, -1)
            if not 0 <= target < placement.num_stages:
                continue
            if rank_of[target] == rank:
                continue
            name = "activation" if kind == "forward" else "gradient"
            transfer = Transfer(name, microbatch, stage, target)
            sends[rank][end].append(transfer)
            receives[rank_of[target]][end].append(transfer)
    return sends, receives


def _merge(
    work: Sequence[Work],
    times: list[Times],
    sends: dict[int, list[Transfer]],
    receives: dict[int, list[Transfer]],
) -> list[Instruction]:
    """Work and waves of one rank in the order of time; a wave comes before work of its moment."""
    merged: list[Instruction] = []
    waves = iter(sorted(sends.keys() | receives.keys()))
    time = next(waves, None)
    for item, (start, _) in zip(work, times, strict=True):
        while time is not None and time <= start:
            merged.append(Exchange(_ordered(sends, time), _ordered(receives, time)))
            time = next(waves, None)
        merged.append(item)
    while time is not None:
        merged.append(Exchange(_ordered(sends, time), _ordered(receives, time)))
        time = next(waves, None)
    return merged


def _ordered(waves: dict[int, list[Transfer]], time: int) -> tuple[Transfer, ...]:
    """Both sides of a pair list the transfers of a wave alike."""
    return tuple(sorted(waves.get(time, ())))
