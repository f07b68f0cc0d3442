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
from operator import itemgetter

from megatron.core.pipeline_parallel.plan import (
    Instruction,
    Placement,
    TensorKind,
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
    waves = _waves(work, placement, times)
    return [_merge(*of_rank) for of_rank in zip(work, times, waves, strict=True)]


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
    steady = [_steady_state(rank_work) for rank_work in work]
    # An empty steady state has no pairs.
    left = [
        deque(_units(rank_work, in_pairs and bool(passes)))
        for rank_work, passes in zip(work, steady, strict=True)
    ]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, units in enumerate(left):
            while units:
                passes = [(kind, m, placement.stage(rank, chunk)) for kind, m, chunk in units[0]]
                needed = [s for p in passes if (s := inputs(p, placement.num_stages)) is not None]
                if not ends.keys() >= {*needed}:
                    break
                ahead = steady_latency if len(times[rank]) in steady[rank] else latency
                now = times[rank][-1][1] if times[rank] else 0
                now = max([now, *(ends[source] + ahead for source in needed)])
                end = now + len(passes)
                times[rank] += [(now, end)] * len(passes)
                ends |= dict.fromkeys(passes, end)
                units.popleft()
                has_moved = True
    if any(left):
        stuck = {rank: units[0][0] for rank, units in enumerate(left) if units}
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


# Time -> sends and receives of a rank.
Waves = dict[int, tuple[list[Transfer], list[Transfer]]]


def _waves(
    work: Sequence[Sequence[Work]], placement: Placement, times: list[list[Times]]
) -> list[Waves]:
    """Return each rank's transfers, keyed by the time at which the source pass ends.

    Sender and receiver use the same key, so both post a transfer in the same wave.
    """
    waves: list[Waves] = [defaultdict(lambda: ([], [])) for _ in work]
    for rank, rank_work in enumerate(work):
        for (kind, microbatch, chunk), (_, end) in zip(rank_work, times[rank], strict=True):
            stage = placement.stage(rank, chunk)
            target = {"forward": stage + 1, "backward": stage - 1}.get(kind, -1)
            if not 0 <= target < placement.num_stages:
                continue
            receiver, _ = placement.location(target)
            if receiver != rank:
                tensor: TensorKind = "activation" if kind == "forward" else "gradient"
                transfer = Transfer(tensor, microbatch, stage, target)
                waves[rank][end][0].append(transfer)
                waves[receiver][end][1].append(transfer)
    return waves


def _merge(work: Sequence[Work], times: list[Times], waves: Waves) -> list[Instruction]:
    """Merge one rank's work and waves by time.

    The transfers of a wave are sorted, so that both ends post them in the same order.
    """
    timed: list[tuple[int, Instruction]] = [
        (time, TransferBatch(tuple(sorted(sends)), tuple(sorted(receives))))
        for time, (sends, receives) in waves.items()
    ]
    timed += [(start, item) for item, (start, _) in zip(work, times, strict=True)]
    # Sorting is stable: a wave precedes the pass that starts at its time.
    return [item for _, item in sorted(timed, key=itemgetter(0))]
