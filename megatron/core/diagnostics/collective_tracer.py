"""Trace this rank's collectives so that a hang report can name the one that did not finish.

`note_collectives` wraps the methods of torch's process groups, so that callers need no change.  It
costs 0.7 us per call (benchmarks/noted_collectives.py).  On a GPU the host does not wait for a
collective: the trace then has the last collectives that the rank has started.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.rank_local import each_rank_owns

_TRANSFERS = ("send", "recv")
# Method of a process group (names of torch 2.11 to 2.13) -> operation in reports.
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
# Slots of `Record.board`: time.monotonic_ns() of the last sign, whether the rank is in a
# collective, and the number of the last call in its group.
SIGN_NS, IS_INSIDE, CALL = range(3)


@dataclass(slots=True)
class _Group:
    label: str
    ranks: list[int]
    me: int
    calls: int = 0
    names: dict[tuple[str, int | None], bytes] = field(default_factory=dict)  # for `Board.name`


# An operation that was started: name, group, number of the call in the group, peer and purpose of a
# send or receive, and the id of its Work.  A list, since it is faster to create than an object.
_Note = list[Any]


def _title(operation: str, group: _Group, peer: int | None) -> str:
    if peer is not None:
        ends = [group.ranks[group.me], group.ranks[peer]]
        path = "->".join(str(rank) for rank in (ends if operation == "send" else ends[::-1]))
        return f"{group.label} {operation} {path}"
    ranks = " ".join(str(rank) for rank in group.ranks[:_SHOWN_RANKS])
    more = f" ... {group.ranks[-1]}" if len(group.ranks) > _SHOWN_RANKS else ""
    return f"{group.label} {operation} of ranks {ranks}{more}"


def _describe(note: _Note) -> str:
    operation, group, call, peer, purpose, _ = note
    about = "" if purpose is None else f", {purpose}"
    return f"{_title(operation, group, peer)}{about}, call {call}"


@dataclass(frozen=True, slots=True)
class Board:
    """Memory that another process can read, into which the tracer writes the current collective."""

    slots: memoryview[int]  # see SIGN_NS, IS_INSIDE, CALL
    name: memoryview  # operation, group and ranks in UTF-8, padded with zeros

    def sign(self) -> None:
        """Write the time."""
        self.slots[SIGN_NS] = time.monotonic_ns()

    def wait(self, work: int) -> None:
        """Write that the host waits for the collective with this id of its Work."""
        self.slots[IS_INSIDE] = 1
        if record.begun and record.begun[-1][-1] != work:
            for note in reversed(record.begun):
                if note[-1] == work:
                    self.set_name(note)
                    return

    def set_name(self, note: _Note) -> None:
        """Write name and call number of ``note``."""
        operation, group, call, peer, _, _ = note
        name = group.names.get((operation, peer))
        if name is None:
            size = len(self.name)
            name = _title(operation, group, peer).encode()[:size].ljust(size, b"\0")
            group.names[operation, peer] = name
        self.name[:] = name
        self.slots[CALL] = call


@dataclass(slots=True)
class Record:
    """Trace of this rank: the operation in progress and the last operations started."""

    inside: _Note | None = None  # the call that has not returned
    awaits: int = 0  # id of the Work that the host waits for; 0: none
    waited_s: float = 0.0  # total time in ``Work.wait``
    progress: int = 0  # number of operations started plus number of waits completed
    is_idle: bool = False  # the rank waits for work, however long that takes
    begun: deque[_Note] = field(default_factory=lambda: deque(maxlen=256))
    purposes: Iterator[object] = iter(())  # descriptions of the next sends and receives, in order
    groups: dict[int, _Group] = field(default_factory=dict)
    board: Board | None = None  # of a rank with a heartbeat

    def __str__(self) -> str:
        """Return ``waits in tp all_reduce of ranks 0 1, call 12``, or the last operation."""
        for note in reversed(self.begun):
            if note is self.inside or (self.awaits and note[-1] == self.awaits):
                return f"waits in {_describe(note)}"
        if self.awaits:
            return "waits in an operation begun long ago"
        last = f"the last was {_describe(self.begun[-1])}" if self.begun else "there was none"
        return f"is in no collective; {last}"

    def counts(self) -> str:
        """Return the number of operations started in each group; a rank with fewer is behind."""
        return ", ".join(f"{group.label} {group.calls}" for group in self.groups.values())


record = Record()
each_rank_owns(__name__, "record")


@contextmanager
def waiting_for_work(is_idle: bool) -> Iterator[None]:
    """Set in this context whether the rank waits for work: then it reports no stall."""
    before = record.is_idle
    record.is_idle = is_idle
    try:
        yield
    finally:
        record.is_idle = before


def note_collectives() -> None:
    """Start to trace the collectives of this process; a second call has no effect."""
    if vars(ProcessGroup)["barrier"].__module__ == __name__:
        return
    for method, operation in _METHODS.items():
        if method in vars(ProcessGroup):
            setattr(ProcessGroup, method, _trace_method(operation, getattr(ProcessGroup, method)))
    dist.Work.wait = _trace_wait(dist.Work.wait)  # type: ignore[method-assign]


def _trace_method(operation: str, begin: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    is_transfer = operation in _TRANSFERS

    def traced(self: ProcessGroup, *args: object, **kwargs: object) -> dist.Work:
        group = record.groups.get(id(self)) or _new_group(self)
        group.calls += 1
        peer = purpose = None
        if is_transfer:  # arguments: tensors, peer rank in the group, tag
            peer, purpose = args[1], next(record.purposes, None)
        note = record.inside = [operation, group, group.calls, peer, purpose, 0]
        record.begun.append(note)
        record.progress += 1
        if record.board is not None:
            record.board.slots[IS_INSIDE] = 1
            record.board.set_name(note)
            record.board.sign()
        work = begin(self, *args, **kwargs)
        note[-1] = id(work)
        record.inside = None
        if record.board is not None:
            record.board.slots[IS_INSIDE] = 0
        return work

    return traced


def _trace_wait(wait: Callable[..., bool]) -> Callable[..., bool]:
    def traced(self: dist.Work, *args: object, **kwargs: object) -> bool:
        record.awaits = id(self)
        if record.board is not None:
            record.board.wait(record.awaits)
        began_s = time.perf_counter()
        result = wait(self, *args, **kwargs)
        record.waited_s += time.perf_counter() - began_s
        record.awaits = 0  # after an exception it keeps the id, for the report
        record.progress += 1
        if record.board is not None:
            record.board.slots[IS_INSIDE] = 0
            record.board.sign()
        return result

    return traced


def _new_group(group: ProcessGroup) -> _Group:
    name = "world" if group is dist.group.WORLD else group.group_desc
    ranks = dist.get_process_group_ranks(group)
    record.groups[id(group)] = _Group(name, ranks, group.rank())
    return record.groups[id(group)]
