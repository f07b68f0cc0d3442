"""What this rank does with other ranks: noted at each collective, told when one does not end.

`note_collectives` puts a few instructions around the methods of torch's process groups, so that no
caller has to say anything; benchmarks/noted_collectives.py has what they cost, 0.7 us a call.  On a
GPU a collective is begun and not waited for: there the last ones begun tell how far the rank came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.rank_local import each_rank_owns

_TRANSFERS = ("send", "recv")
# Methods of a process group, in the names of torch 2.11 to 2.13, and what they are called here.
_METHODS = {
    method: operation
    for operation, methods in {
        "all_reduce": "allreduce allreduce_coalesced",
        "all_gather": "allgather allgather_coalesced _allgather_base all_gather_single "
        "allgather_into_tensor_coalesced all_gather_single_coalesced",
        "reduce_scatter": "reduce_scatter _reduce_scatter_base reduce_scatter_single "
        "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced",
        "all_to_all": "alltoall alltoall_base all_to_all_single",
    }.items()
    for method in methods.split()
} | {name: name for name in ("reduce", "broadcast", "gather", "scatter", "barrier", *_TRANSFERS)}
_SHOWN_RANKS = 8


@dataclass(slots=True)
class _Group:
    label: str
    ranks: list[int]
    me: int
    calls: int = 0


# One operation that was begun: its name, the group, the number of the call in it, the peer of a
# transfer, what it carries, and the id of the work that is waited for.  A list is made soonest.
_Note = list[Any]


def _told(note: _Note) -> str:
    operation, group, call, peer, purpose, _ = note
    if peer is not None:
        ends = [group.ranks[group.me], group.ranks[peer]]
        path = "->".join(str(rank) for rank in (ends if operation == "send" else ends[::-1]))
        about = "" if purpose is None else f", {purpose}"
        return f"{group.label} {operation} {path}{about}, call {call}"
    ranks = " ".join(str(rank) for rank in group.ranks[:_SHOWN_RANKS])
    more = f" ... {group.ranks[-1]}" if len(group.ranks) > _SHOWN_RANKS else ""
    return f"{group.label} {operation} of ranks {ranks}{more}, call {call}"


@dataclass(slots=True)
class Record:
    """What the rank is in, and what it has begun."""

    inside: _Note | None = None  # a call that has not returned
    awaits: int = 0  # id of the work that is waited for
    waited_s: float = 0.0  # for works, in all
    progress: int = 0  # moves with everything that is begun or has been waited for
    begun: deque[_Note] = field(default_factory=lambda: deque(maxlen=256))
    purposes: Iterator[object] = iter(())
    groups: dict[int, _Group] = field(default_factory=dict)

    def __str__(self) -> str:
        """``waits in tp all_reduce of ranks 0 1, call 12``, or what came last."""
        for note in reversed(self.begun):
            if note is self.inside or (self.awaits and note[-1] == self.awaits):
                return f"waits in {_told(note)}"
        if self.awaits:
            return "waits in an operation begun long ago"
        last = f"the last was {_told(self.begun[-1])}" if self.begun else "there was none"
        return f"is in no collective; {last}"

    def counts(self) -> str:
        """How many operations of each group were begun: whoever has fewer is behind."""
        return ", ".join(f"{group.label} {group.calls}" for group in self.groups.values())


record = Record()
each_rank_owns(__name__, "record")


def name_transfers(purposes: Iterable[object]) -> None:
    """What the next sends and receives of this rank carry, in order."""
    record.purposes = iter(purposes)


def note_collectives() -> None:
    """Note from now on what this process begins and waits for."""
    if vars(ProcessGroup)["barrier"].__module__ == __name__:
        return
    for method, operation in _METHODS.items():
        if method in vars(ProcessGroup):
            setattr(ProcessGroup, method, _noted(operation, getattr(ProcessGroup, method)))
    dist.Work.wait = _noted_wait(dist.Work.wait)  # type: ignore[method-assign]


def _noted(operation: str, begin: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    is_transfer = operation in _TRANSFERS

    def noted(self: ProcessGroup, *args: object, **kwargs: object) -> dist.Work:
        group = record.groups.get(id(self)) or _new_group(self)
        group.calls += 1
        peer = purpose = None
        if is_transfer:  # of tensors, to or from a rank, under a tag
            peer, purpose = args[1], next(record.purposes, None)
        note = record.inside = [operation, group, group.calls, peer, purpose, 0]
        record.begun.append(note)
        record.progress += 1
        work = begin(self, *args, **kwargs)
        note[-1] = id(work)
        record.inside = None
        return work

    return noted


def _noted_wait(wait: Callable[..., bool]) -> Callable[..., bool]:
    def noted(self: dist.Work, *args: object, **kwargs: object) -> bool:
        record.awaits = id(self)
        began_s = time.perf_counter()
        result = wait(self, *args, **kwargs)
        record.waited_s += time.perf_counter() - began_s
        record.awaits = 0  # not after an error: what could not be waited for is of interest
        record.progress += 1
        return result

    return noted


def _new_group(group: ProcessGroup) -> _Group:
    name = "world" if group is dist.group.WORLD else group.group_desc
    ranks = dist.get_process_group_ranks(group)
    record.groups[id(group)] = _Group(name, ranks, group.rank())
    return record.groups[id(group)]
