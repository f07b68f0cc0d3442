"""What each pipeline rank does in one step, as data: no torch, no communication.

A pipeline of virtual stages 0 .. num_stages - 1, several of them on a rank (its model chunks).  A
schedule gives each rank the order of its work; adding the transfers between stages to it gives the
instructions that `executor` follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

PassKind = Literal["forward", "backward", "weight"]


class Work(NamedTuple):
    """A pass of one micro-batch through one chunk.

    "backward" computes the gradients of inputs, and those of weights unless the plan has a
    "weight" for the same micro-batch and chunk.
    """

    kind: PassKind
    microbatch: int  # 0 .. num_microbatches - 1
    chunk: int  # which of this rank's model chunks


def is_pair(one: object, other: object) -> bool:
    """Whether two passes of a rank, next to each other, can run at once: neither needs the other.

    So it is in plans that are made for pairs (`orders`), where what a backward pass needs is there
    before the forward pass in front of it.
    """
    return (
        isinstance(one, Work)
        and isinstance(other, Work)
        and (one.kind, other.kind) == ("forward", "backward")
        and one.microbatch != other.microbatch
    )


def most_in_flight(plan: Iterable[object], chunk: int) -> int:
    """Micro-batches of a chunk of a rank that are between forward and backward at one time."""
    now = most = 0
    for work in plan:
        if isinstance(work, Work) and work.chunk == chunk:
            now += {"forward": 1, "backward": -1, "weight": 0}[work.kind]
            most = max(most, now)
    return most


class Transfer(NamedTuple):
    """One tensor on its way from a virtual stage to a neighbour on another rank."""

    kind: Literal["activation", "gradient"]
    microbatch: int
    source: int  # virtual stage
    target: int


class TransferBatch(NamedTuple):
    """Sends and receives of one rank that are posted together, as one operation."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


Instruction = Work | TransferBatch


@dataclass(frozen=True)
class Placement:
    """Which virtual stage lies where.

    A tensor goes through the ranks of chunk 0, then of chunk 1, ...; with ``is_v`` every second
    chunk is passed through backwards, so that the last rank of a chunk is the first of the next.
    """

    num_ranks: int
    num_chunks: int = 1
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage of one chunk of a rank."""
        turned = self.is_v and chunk % 2 == 1
        return chunk * self.num_ranks + (self.num_ranks - 1 - rank if turned else rank)

    def location(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a virtual stage."""
        chunk, place = divmod(stage, self.num_ranks)
        turned = self.is_v and chunk % 2 == 1
        return (self.num_ranks - 1 - place if turned else place), chunk


def placement_of(schedule: str | None, num_ranks: int, num_chunks: int) -> Placement:
    """Where the stages lie under ``--pipeline-schedule schedule``."""
    return Placement(num_ranks, num_chunks, is_v=schedule == "zb-v")
