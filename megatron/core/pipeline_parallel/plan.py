"""Plan of a pipeline: passes, transfers, virtual stages, and the order of passes of each schedule.

Pure: no torch, no communication.  A pipeline has virtual stages 0 .. num_stages - 1; a rank may
hold several of them (its model chunks).  `schedule_of` returns an order, one tuple of `Work` per
rank; `communication_plan` adds the transfers between stages, and the tests simulate the result,
which finds deadlocks.  The result is the list of instructions that `executor` runs.

Zero-bubble schedules (arXiv 2401.10241) fill the pipeline bubble with weight gradients, which are
needed only at the end of the step: a rank computes them separately from input gradients, in passes
of their own, when it would otherwise wait for another stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

from megatron.core.config.errors import ConfigError

PassKind = Literal["forward", "backward", "weight"]
TensorKind = Literal["activation", "gradient"]


class Work(NamedTuple):
    """A pass of one micro-batch through one chunk.

    "backward" computes the gradients of inputs, and those of weights unless the plan has a
    "weight" for the same micro-batch and chunk.
    """

    kind: PassKind
    microbatch: int  # 0 .. num_microbatches - 1
    chunk: int  # which of this rank's model chunks


def is_pair(one: object, other: object) -> bool:
    """Return whether two consecutive passes of a rank can be interleaved.

    True for a forward pass followed by the backward pass of another micro-batch, in plans that are
    made for pairs (``in_pairs``): these receive the input of the backward pass before the forward
    pass starts.
    """
    return (
        isinstance(one, Work)
        and isinstance(other, Work)
        and (one.kind, other.kind) == ("forward", "backward")
        and one.microbatch != other.microbatch
    )


def most_in_flight(plan: Iterable[object], chunk: int) -> int:
    """Return the maximum number of micro-batches between forward and backward in one chunk."""
    now = most = 0
    for work in plan:
        if isinstance(work, Work) and work.chunk == chunk:
            now += {"forward": 1, "backward": -1, "weight": 0}[work.kind]
            most = max(most, now)
    return most


class Transfer(NamedTuple):
    """Transfer of one tensor from a virtual stage to a neighbouring stage on another rank."""

    kind: TensorKind
    microbatch: int
    source: int  # virtual stage
    target: int


class TransferBatch(NamedTuple):
    """Sends and receives that one rank posts together, as one operation."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


Instruction = Work | TransferBatch


@dataclass(frozen=True)
class Placement:
    """Assignment of virtual stages to (rank, chunk).

    Consecutive stages are chunk 0 of all ranks, then chunk 1 of all ranks, and so on.  With
    ``is_v`` odd chunks have the reverse rank order, so that the last rank of a chunk is the first
    of the next one.
    """

    num_ranks: int
    num_chunks: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """Number of virtual stages of the pipeline."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the virtual stage of chunk ``chunk`` of ``rank``."""
        turned = self.is_v and chunk % 2 == 1
        return chunk * self.num_ranks + (self.num_ranks - 1 - rank if turned else rank)

    def location(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a virtual stage."""
        chunk, place = divmod(stage, self.num_ranks)
        turned = self.is_v and chunk % 2 == 1
        return (self.num_ranks - 1 - place if turned else place), chunk


def placement_of(schedule: str | None, num_ranks: int, num_chunks: int) -> Placement:
    """Return the placement of stages under ``--pipeline-schedule schedule``."""
    return Placement(num_ranks, num_chunks, is_v=schedule == "zb-v")


# Values of --pipeline-schedule -> chunks of each rank; None is any number above one.
SCHEDULES = {"1f1b": 1, "interleaved": None, "zb-h1": 1, "zb-v": 2}

Orders = tuple[tuple[Work, ...], ...]


@lru_cache(maxsize=16)
def schedule_of(
    name: str | None,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int | None = None,
    forward_only: bool = False,
    in_pairs: bool = False,
) -> tuple[Placement, Orders]:
    """Return the placement of the virtual stages and the order of work of each rank.

    ``name`` is the value of --pipeline-schedule; None selects 1f1b, or interleaved if a rank has
    several chunks.  ``group`` is the number of micro-batches that pass through one chunk before the
    next chunk starts (default: the number of ranks).  ``in_pairs`` runs one more forward pass
    during warmup, so that a forward pass and the backward pass after it are independent of each
    other and can overlap (`is_pair`).
    """
    name = name or ("interleaved" if num_chunks > 1 else "1f1b")
    if sentence := wrong_chunks(name, num_chunks):
        raise ConfigError(sentence)
    placement = placement_of(name, num_ranks, num_chunks)
    more = num_microbatches, group or num_ranks, forward_only, in_pairs
    return placement, tuple(_order(name, placement, rank, *more) for rank in range(num_ranks))


def wrong_chunks(name: str, num_chunks: int) -> str | None:
    """Return the error message if this schedule cannot run ``num_chunks`` chunks per rank."""
    wanted = SCHEDULES[name]
    if num_chunks == wanted or (wanted is None and num_chunks > 1):
        return None
    fix = "use --pipeline-schedule interleaved for virtual stages"
    if wanted != 1:
        fix = (
            f"give --num-virtual-stages-per-pipeline-rank {wanted or 2}, or a "
            f"--pipeline-model-parallel-layout with {wanted or 2} stages per rank"
        )
    stages = "1 virtual stage" if wanted == 1 else f"{wanted or 'several'} virtual stages"
    return f"--pipeline-schedule {name} needs {stages} per pipeline rank, not {num_chunks}: {fix}"


def _order(
    name: str,
    placement: Placement,
    rank: int,
    num_microbatches: int,
    group: int,
    forward_only: bool,
    in_pairs: bool,
) -> tuple[Work, ...]:
    if name == "zb-v":
        order = _forward_v if forward_only else _zb_v
        return order(rank, placement.num_ranks, num_microbatches)
    if name == "zb-h1" and not forward_only:
        return _zb_h1(rank, placement.num_ranks, num_microbatches)
    sizes = _groups(placement, num_microbatches, group)
    # (micro-batch, chunk) of each forward pass: each group, chunk after chunk.
    passes = [
        (sum(sizes[:number]) + i, chunk)
        for number, size in enumerate(sizes)
        for chunk in range(placement.num_chunks)
        for i in range(size)
    ]
    forwards = [Work("forward", m, c) for m, c in passes]
    if forward_only:
        return tuple(forwards)
    last_chunk = placement.num_chunks - 1
    backwards = [Work("backward", m, last_chunk - c) for m, c in passes]
    behind = placement.num_ranks - 1 - rank
    # 1F1B needs one forward pass in flight per later rank.  With several chunks, or in pairs, a
    # rank runs two per later rank, so that a transfer overlaps with the pass before its use; the
    # first group also has to pass through all chunks but the last before the first backward pass.
    is_ahead = last_chunk > 0 or in_pairs
    warmup = 2 * behind + last_chunk * sizes[0] + in_pairs if is_ahead else behind
    return (*forwards[:warmup], *_in_turn(forwards[warmup:], backwards))


def _passes(kind: PassKind, num_microbatches: int, chunk: int = 0) -> list[Work]:
    return [Work(kind, m, chunk) for m in range(num_microbatches)]


def _in_turn(*lists: Sequence[Work | None]) -> Iterator[Work]:
    """Yield the first element of each list, then the second of each, and so on; skip None."""
    for step in zip_longest(*lists):
        yield from filter(None, step)


def _forward_v(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Work, ...]:
    """Order the forward passes of a V placement (evaluation): chunk 0 first, then alternate."""
    down = _passes("forward", num_microbatches)
    # Chunk 0 of this rank is stage `rank`, chunk 1 is stage 2 * num_ranks - 1 - rank.  The first
    # micro-batch needs that difference in passes to return, and so many chunk-0 passes fill it.
    ahead = 2 * (num_ranks - 1 - rank) + 1
    return (*down[:ahead], *_in_turn(_passes("forward", num_microbatches, 1), down[ahead:]))


def _groups(placement: Placement, num_microbatches: int, group: int) -> list[int]:
    """Return the sizes of the groups of micro-batches that pass through one chunk in a row.

    With groups smaller than the number of ranks the order deadlocks: the first rank reaches the
    second chunk of a group before the last rank has finished the first one.  A smaller last group
    alone only leaves ranks idle; its micro-batches join the first group instead, since the length
    of the warmup follows from the size of the first group.
    """
    if placement.num_chunks == 1:
        return [num_microbatches]
    if group < placement.num_ranks:
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is smaller than "
            f"--pipeline-model-parallel-size {placement.num_ranks}: the pipeline would "
            f"deadlock; give {placement.num_ranks} or more"
        )
    full, rest = divmod(num_microbatches, group)
    if full and rest < placement.num_ranks:
        return [group + rest] + [group] * (full - 1)
    return [group] * full + [rest]


def _zb_h1(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Work, ...]:
    """Return the order of ZB-H1: 1F1B with each weight pass delayed by ``rank`` backward passes.

    Later ranks run fewer forward passes during warmup, so that no rank holds the activations of
    more micro-batches than rank 0 does.
    """
    forwards = _passes("forward", num_microbatches)
    ahead = num_ranks - rank
    behind = min(rank, num_microbatches)
    return (
        *forwards[:ahead],
        *_in_turn(
            _passes("backward", num_microbatches),
            [*[None] * behind, *_passes("weight", num_microbatches)],
            forwards[ahead:],
        ),
    )


def _zb_v(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Work, ...]:
    """Return the order of ZB-V: two chunks per rank in V placement.

    A rank holds activations of at most 2 * num_ranks passes of a chunk, the memory of 1F1B.  The
    pattern is built for at least 2 * num_ranks - 1 micro-batches; passes of micro-batches that the
    step does not have are left out.
    """
    total = max(num_microbatches, 2 * num_ranks - 1)
    behind = num_ranks - rank
    rounds = (
        [("f0", 2 * behind - 1), ("f1 f0", rank), ("f1 b1 w1", behind)]
        + [("f0 b0 w0 f1 b1 w1", total - num_ranks), ("b0 b1", rank), ("b0 w0", behind)]
        + [("w1", rank), ("w0", rank)]
    )
    kinds: dict[str, PassKind] = {"f": "forward", "b": "backward", "w": "weight"}
    done: Counter[str] = Counter()
    order = []
    for passes, times in rounds:
        for name in passes.split() * times:
            if done[name] < num_microbatches:
                order.append(Work(kinds[name[0]], done[name], int(name[1])))
            done[name] += 1
    return tuple(order)
