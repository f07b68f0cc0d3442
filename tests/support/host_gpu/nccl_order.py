"""Simulate NCCL on the calls that each rank of a run made: detect deadlocks and wrong matches.

Gloo buffers what it sends and runs the operations of a group side by side, so a run over gloo can
end where NCCL hangs.  Rules of NCCL and of ``ProcessGroupNCCL``, without eager connection:

- A communicator is created by its first operation, which blocks the host until every member has
  begun its own first operation.  A batch of sends and receives uses the communicator of the group,
  a single send or receive one of its two ranks alone.
- A rank runs the operations of one communicator one after another, in the order of their calls.
- A collective ends when every member runs its collective with the same number; a send when the
  receiver runs the receive with the same number from that rank.  A batch is one operation.
- What a rank starts after a wait runs after the end of what it waited for.
- With CUDA_DEVICE_MAX_CONNECTIONS=1 (``one_queue``) an operation starts only after all operations
  that the rank has called before, on any communicator.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class Part(NamedTuple):
    """A send to, or a receive from, the global rank ``peer``; ``form`` is dtype and size."""

    is_send: bool
    peer: int
    form: str


class Operation(NamedTuple):
    """A call: a collective (``parts`` is empty) or sends and receives, on ``communicator``."""

    number: int  # unique on its rank, for `Wait`
    communicator: str
    form: str  # of a collective: what must be equal on all ranks
    parts: tuple[Part, ...] = ()


class Wait(NamedTuple):
    """The rank waits for operation ``number``."""

    number: int


Call: TypeAlias = Operation | Wait
# (communicator, sending rank or -1, receiving rank or -1, number of the transfer or collective)
_Key: TypeAlias = tuple[str, int, int, int]


class WrongOrderError(Exception):
    """The ranks would hang on NCCL, or would receive what was meant for another operation."""


@dataclass
class _Rank:
    calls: Sequence[Call]
    position: int = 0
    entered: set[str] = field(default_factory=set)  # communicators whose creation it has begun
    waiting: list[Operation] = field(default_factory=list)  # called but not started, in order
    running: dict[str, Operation] = field(default_factory=dict)  # by communicator
    ended: set[int] = field(default_factory=set)
    counts: defaultdict[tuple[str, int, int], int] = field(default_factory=lambda: defaultdict(int))
    keys: dict[int, list[_Key]] = field(default_factory=dict)  # of a running operation


def check(
    calls: Sequence[Sequence[Call]],
    members: Mapping[str, Sequence[int]],
    *,
    one_queue: bool,
) -> None:
    """Run the calls of every rank to the end.  Raises WrongOrderError.

    ``members``: the global ranks of each communicator.
    """
    _Run(calls, members, one_queue).to_the_end()


class _Run:
    def __init__(
        self,
        calls: Sequence[Sequence[Call]],
        members: Mapping[str, Sequence[int]],
        one_queue: bool,
    ) -> None:
        self.ranks = [_Rank(each) for each in calls]
        self.members = members
        self.one_queue = one_queue
        self.forms: dict[_Key, tuple[str, int]] = {}  # of started operations, and their first rank
        self.started: defaultdict[_Key, set[int]] = defaultdict(set)
        self.runnable = deque(range(len(calls)))

    def to_the_end(self) -> None:
        while self.runnable:
            rank = self.runnable.popleft()
            while self._advance(rank) or self._start(rank) or self._end(rank):
                pass
        stuck = {i: r for i, r in enumerate(self.ranks) if r.position < len(r.calls) or r.running}
        if stuck:
            lines = "\n".join(f"rank {i} {self._why(r)}" for i, r in stuck.items())
            raise WrongOrderError(f"the ranks hang on NCCL:\n{lines}")

    def _why(self, rank: _Rank) -> str:
        if rank.position == len(rank.calls):
            return f"has made all calls, but these do not end: {[*rank.running.values()]}"
        call = rank.calls[rank.position]
        if isinstance(call, Operation):
            ranks = self.members[call.communicator]
            absent = [r for r in ranks if call.communicator not in self.ranks[r].entered]
            return f"creates the communicator for {call}, ranks {absent} do not"
        (operation,) = (
            c for c in rank.calls if isinstance(c, Operation) and c.number == call.number
        )
        return f"waits for {operation}; it runs {[*rank.running.values()]}"

    def _advance(self, rank: int) -> bool:
        """Make the next call of the rank; return False if it blocks or none is left."""
        state = self.ranks[rank]
        if state.position == len(state.calls):
            return False
        call = state.calls[state.position]
        if isinstance(call, Wait):
            if call.number not in state.ended:
                return False
        else:
            ranks = self.members[call.communicator]
            name = call.communicator
            if name not in state.entered:
                state.entered.add(name)
                if all(name in self.ranks[r].entered for r in ranks):
                    self.runnable.extend(ranks)
            if not all(name in self.ranks[r].entered for r in ranks):
                return False
            state.waiting.append(call)
        state.position += 1
        return True

    def _start(self, rank: int) -> bool:
        """Start the first operation of the rank that can; return whether there is one."""
        state = self.ranks[rank]
        busy = set(state.running)
        for place, operation in enumerate(state.waiting):
            if operation.communicator not in busy:
                del state.waiting[place]
                self._run(rank, operation)
                return True
            if self.one_queue:
                return False
            busy.add(operation.communicator)
        return False

    def _run(self, rank: int, operation: Operation) -> None:
        state = self.ranks[rank]
        state.running[operation.communicator] = operation
        state.keys[operation.number] = keys = list(self._keys(rank, operation))
        forms = [p.form for p in operation.parts] or [operation.form]
        for key, form in zip(keys, forms, strict=True):
            first, other = self.forms.setdefault(key, (form, rank))
            if first != form:
                raise WrongOrderError(
                    f"{self._name(key)}: rank {other} calls {first}, rank {rank} calls {form}"
                )
            self.started[key].add(rank)
            self.runnable.extend(self.started[key])

    def _keys(self, rank: int, operation: Operation) -> Iterator[_Key]:
        counts = self.ranks[rank].counts
        name = operation.communicator
        pairs = [(rank, p.peer) if p.is_send else (p.peer, rank) for p in operation.parts]
        for source, target in pairs or [(-1, -1)]:
            yield name, source, target, counts[name, source, target]
            counts[name, source, target] += 1

    def _end(self, rank: int) -> bool:
        """End the operations of the rank whose peers all run theirs; return whether any did."""
        state = self.ranks[rank]
        ending = [o for o in state.running.values() if all(map(self._is_met, state.keys[o.number]))]
        for operation in ending:
            del state.running[operation.communicator]
            state.ended.add(operation.number)
        return bool(ending)

    def _is_met(self, key: _Key) -> bool:
        name, source, target, _ = key
        needed = self.members[name] if source < 0 else {source, target}
        return self.started[key].issuperset(needed)

    def _name(self, key: _Key) -> str:
        name, source, target, number = key
        what = "collective" if source < 0 else f"transfer from rank {source} to {target}"
        return f"{what} {number} on {name} {list(self.members[name])}"
