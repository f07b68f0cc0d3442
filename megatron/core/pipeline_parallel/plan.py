"""Data types of a pipeline plan: passes, transfers and the placement of virtual stages.

Pure: no torch, no communication.  A pipeline has virtual stages 0 .. num_stages - 1; a rank may
hold several of them (its model chunks).  A schedule determines the order of each rank's work
(`schedule_order`); `communication_plan` adds the transfers between stages.  The result is the list
of instructions that `executor` runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
