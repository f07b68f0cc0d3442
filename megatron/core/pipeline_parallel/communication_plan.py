"""Add the sends and receives between pipeline ranks to an order of work.

Pure: every rank computes the plan of all ranks and takes its own.  Two properties of NCCL decide
the construction: a send may block until its receive is posted, and the transfers between two ranks
are matched by order, not by tag.  So all passes are placed on one global clock on which every pass
takes one unit of time, and all transfers whose source finishes at the same time form one wave.  On
each rank a wave is one TransferBatch, placed before the first pass that starts at or after that
time.

Why this cannot deadlock: a wave depends only on passes that end at or before its time, and every
pass that needs the wave starts at or after it.  Ordered by time, the earliest unfinished item can
always run, whether a rank waits for a TransferBatch at once or only when it uses the tensors.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Literal

from megatron.core.pipeline_parallel.plan import (
    Instruction,
    Placement,
    Transfer,
    TransferBatch,
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
    """Return the instructions of each rank, given the ordered work of all ranks.

    ``work`` consists of tuples, since the result is cached.  ``early`` posts receives one pass
    earlier during warmup and flush (``--overlap-p2p-communication-warmup-flush``).  ``in_pairs``
    places no transfer between the two passes of a pair.
    """
    clock = partial(_clock, work, placement, latency=int(early), in_pairs=in_pairs)
    times = clock(steady_latency=0)
    # In the steady state, leave one pass between a transfer and its use if the order of work has
    # the slack: then the transfer overlaps with that pass.  Keep it only if no pass ends later.
    relaxed = clock(steady_latency=1)
    if max(map(max, relaxed)) == max(map(max, times)):
        times = relaxed
    sends, receives = _waves(work, placement, times)
    return [
        _merge(rank_work, rank_times, sends[rank], receives[rank])
        for rank, (rank_work, rank_times) in enumerate(zip(work, times, strict=True))
    ]


def inputs(passed: Pass, num_stages: int) -> Pass | None:
    """Return the pass of the neighbouring virtual stage whose output is this pass's input."""
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
    """Return (start, end) of each pass, if a pass takes one unit and a transfer ``latency``.

    ``steady_latency`` is the latency in the steady state, from the first backward pass to the last
    forward pass.  The two passes of a pair start together and end together two units later.
    Raises ValueError if the order of work deadlocks.
    """
    ends: dict[Pass, int] = {}
    times: list[list[Times]] = [[] for _ in work]
    waiting: dict[Pass, int] = {}
    runnable = list(range(len(work)))
    steady = [_steady_state(rank_work) for rank_work in work]
    # An empty steady state has no pairs.
    units = [
        deque(_units(rank_work, in_pairs and bool(passes)))
        for rank_work, passes in zip(work, steady, strict=True)
    ]
    while runnable:
        rank = runnable.pop()
        now = times[rank][-1][1] if times[rank] else 0
        while units[rank]:
            together = units[rank][0]
            passes = [(kind, m, placement.stage(rank, chunk)) for kind, m, chunk in together]
            needed = [s for p in passes if (s := inputs(p, placement.num_stages)) is not None]
            absent = [source for source in needed if source not in ends]
            if absent:
                # This rank continues when that pass gets its times.  If a pair misses two inputs,
                # the rank comes back here and waits for the second.
                waiting[absent[0]] = rank
                break
            ahead = steady_latency if len(times[rank]) in steady[rank] else latency
            now = max([now, *(ends[source] + ahead for source in needed)])
            end = now + len(together)
            for passed in passes:
                times[rank].append((now, end))
                ends[passed] = end
                if (follower := waiting.pop(passed, None)) is not None:
                    runnable.append(follower)
            now = end
            units[rank].popleft()
    if waiting:
        stuck = {rank: work[rank][len(times[rank])] for rank in waiting.values()}
        raise ValueError(f"this order of work never ends: rank -> first work it cannot do {stuck}")
    return times


def _units(work: Sequence[Work], in_pairs: bool) -> Iterator[Sequence[Work]]:
    """Split a rank's work into passes, and with ``in_pairs`` into pairs where it has them."""
    rest = work
    while rest:
        size = 2 if in_pairs and len(rest) > 1 and is_pair(*rest[:2]) else 1
        yield rest[:size]
        rest = rest[size:]


def _steady_state(work: Sequence[Work]) -> range:
    kinds = [item.kind for item in work]
    first_backward = kinds.index("backward") if "backward" in kinds else len(kinds)
    last_forward = len(kinds) - 1 - kinds[::-1].index("forward")
    return range(first_backward, last_forward + 1)


Waves = list[dict[int, list[Transfer]]]  # of each rank: time -> transfers


def _waves(
    work: Sequence[Sequence[Work]], placement: Placement, times: list[list[Times]]
) -> tuple[Waves, Waves]:
    """Return each rank's sends and receives, keyed by the time at which the source pass ends.

    Sender and receiver use the same key, so both post a transfer in the same wave.
    """
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
            what: Literal["activation", "gradient"]
            what = "activation" if kind == "forward" else "gradient"
            transfer = Transfer(what, microbatch, stage, target)
            sends[rank][end].append(transfer)
            receives[rank_of[target]][end].append(transfer)
    return sends, receives


def _merge(
    work: Sequence[Work],
    times: list[Times],
    sends: dict[int, list[Transfer]],
    receives: dict[int, list[Transfer]],
) -> list[Instruction]:
    """Merge one rank's work and waves by time; a wave precedes the pass that starts at its time."""
    merged: list[Instruction] = []
    waves = iter(sorted(sends.keys() | receives.keys()))
    time = next(waves, None)
    for item, (start, _) in zip(work, times, strict=True):
        while time is not None and time <= start:
            merged.append(TransferBatch(_ordered(sends, time), _ordered(receives, time)))
            time = next(waves, None)
        merged.append(item)
    while time is not None:
        merged.append(TransferBatch(_ordered(sends, time), _ordered(receives, time)))
        time = next(waves, None)
    return merged


def _ordered(waves: dict[int, list[Transfer]], time: int) -> tuple[Transfer, ...]:
    """Sort the transfers of a wave, so that both ends post them in the same order."""
    return tuple(sorted(waves.get(time, ())))
