"""Simulate the instructions of all pipeline ranks: detect deadlocks, measure the pipeline bubble.

Pure: no torch, no communication.  The rules are those of NCCL.  Nothing buffers a tensor in
transit: a transfer starts when both ranks have begun the TransferBatch that contains it.  Transfers
between two ranks are matched by order.  A rank runs its batches one after another, each after
the work listed before it, and a batch is complete when all of its transfers are.  Work waits for
the tensors it needs, or (``blocking``) for every TransferBatch listed before it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.pipeline_parallel.communication_plan import Pass, inputs
from megatron.core.pipeline_parallel.plan import (
    Instruction,
    Placement,
    Transfer,
    TransferBatch,
    Work,
)


class DeadlockError(Exception):
    """Deadlock of a plan: ranks wait for each other, or a receive matches the wrong send."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Time of each kind of pass of one micro-batch in one virtual stage, and of a transfer.

    A backward pass whose weight gradients have no pass of their own takes ``backward + weight``.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    transfer: float = 0.0
    stage_loads: Sequence[float] | None = None  # factor of each virtual stage; 1 if not given


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Result of a simulation; the tuples have one entry per rank."""

    finish: float  # when the last rank ends
    busy: tuple[float, ...]
    idle: tuple[float, ...]  # between the rank's first and its last work


@dataclass
class _Rank:
    instructions: Sequence[Instruction]
    separate_weights: set[tuple[int, int]]
    position: int = 0
    now: float = 0.0
    started_at: float | None = None
    busy: float = 0.0
    posted: deque[tuple[TransferBatch, float]] = field(default_factory=deque)
    link_free_at: float = 0.0


def simulate(
    plan: Sequence[Sequence[Instruction]],
    placement: Placement,
    durations: Durations | None = None,
    *,
    blocking: bool = False,
) -> Simulated:
    """Run ``plan``, the instructions of every rank, to completion.

    Raises DeadlockError, which reports the instruction in which each blocked rank waits.
    """
    _check_order(plan, placement)
    run = _Run(plan, placement, durations or Durations(), blocking)
    run.to_the_end()
    finish = max(max(rank.now, rank.link_free_at) for rank in run.ranks)
    return Simulated(
        finish=finish,
        busy=tuple(rank.busy for rank in run.ranks),
        idle=tuple(rank.now - (rank.started_at or 0.0) - rank.busy for rank in run.ranks),
    )


def _check_order(plan: Sequence[Sequence[Instruction]], placement: Placement) -> None:
    """Check that the n-th receive from a rank expects the tensor of that rank's n-th send."""
    sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    received: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for rank, instructions in enumerate(plan):
        for instruction in instructions:
            if isinstance(instruction, TransferBatch):
                for transfer in instruction.sends:
                    sent[rank, placement.location(transfer.target)[0]].append(transfer)
                for transfer in instruction.receives:
                    received[placement.location(transfer.source)[0], rank].append(transfer)
    for pair in sent.keys() | received.keys():
        if sent[pair] != received[pair]:
            both = zip([*sent[pair], None], [*received[pair], None], strict=False)
            place, (one, other) = next((i, p) for i, p in enumerate(both) if p[0] != p[1])
            raise DeadlockError(
                f"transfer {place} from rank {pair[0]} to {pair[1]}: sent {one}, expected {other}"
            )


class _Run:
    def __init__(
        self,
        plan: Sequence[Sequence[Instruction]],
        placement: Placement,
        durations: Durations,
        blocking: bool,
    ) -> None:
        self.placement = placement
        self.durations = durations
        self.blocking = blocking
        self.ranks = [
            _Rank(
                instructions,
                {
                    (item.microbatch, item.chunk)
                    for item in instructions
                    if isinstance(item, Work) and item.kind == "weight"
                },
            )
            for instructions in plan
        ]
        self.begun: dict[tuple[Transfer, bool], float] = {}  # (transfer, is the sending side)
        self.ready: dict[tuple[int, Pass], float] = {}  # output of a pass, on a rank -> since when
        self.runnable = list(range(len(plan)))

    def to_the_end(self) -> None:
        while self.runnable:
            rank = self.runnable.pop()
            while self._transfer(rank) or self._next(rank):
                pass
        stuck = {
            rank: state.posted[0][0] if state.posted else state.instructions[state.position]
            for rank, state in enumerate(self.ranks)
            if state.posted or state.position < len(state.instructions)
        }
        if stuck:
            lines = "\n".join(f"rank {rank} waits in {item}" for rank, item in stuck.items())
            raise DeadlockError(f"the plan deadlocks:\n{lines}")

    def _next(self, rank: int) -> bool:
        """Execute the rank's next instruction; return False if it must wait or none is left."""
        state = self.ranks[rank]
        if state.position == len(state.instructions):
            return False
        item = state.instructions[state.position]
        if isinstance(item, TransferBatch):
            state.posted.append((item, state.now))
        elif not self._work(rank, state, item):
            return False
        state.position += 1
        return True

    def _work(self, rank: int, state: _Rank, work: Work) -> bool:
        stage = self.placement.stage(rank, work.chunk)
        passed = work.kind, work.microbatch, stage
        start = state.now
        if self.blocking:
            if state.posted:
                return False
            start = max(start, state.link_free_at)
        needed = [inputs(passed, self.placement.num_stages), _before(passed)]
        for one in needed:
            if one is not None:
                if (rank, one) not in self.ready:
                    return False
                start = max(start, self.ready[rank, one])
        took = self._duration(state, work, stage)
        state.started_at = start if state.started_at is None else state.started_at
        state.busy += took
        state.now = self.ready[rank, passed] = start + took
        return True

    def _duration(self, state: _Rank, work: Work, stage: int) -> float:
        took: float = getattr(self.durations, work.kind)
        if work.kind == "backward" and (work.microbatch, work.chunk) not in state.separate_weights:
            took += self.durations.weight
        loads = self.durations.stage_loads
        return took if loads is None else took * loads[stage]

    def _transfer(self, rank: int) -> bool:
        """Begin the rank's oldest open batch; complete it if all its peers have begun theirs."""
        state = self.ranks[rank]
        if not state.posted:
            return False
        batch, posted_at = state.posted[0]
        begin = max(posted_at, state.link_free_at)
        end = begin
        for transfers, is_send in ((batch.sends, True), (batch.receives, False)):
            for transfer in transfers:
                if (transfer, is_send) not in self.begun:
                    self.begun[transfer, is_send] = begin
                    # The peer may have been blocked on this side only: try it again.
                    other = transfer.target if is_send else transfer.source
                    self.runnable.append(self.placement.location(other)[0])
                other_begin = self.begun.get((transfer, not is_send))
                end = max(end, float("inf") if other_begin is None else other_begin)
        if end == float("inf"):
            return False
        end += self.durations.transfer
        state.posted.popleft()
        state.link_free_at = end
        for transfer in batch.receives:
            self.ready[rank, _sent_by(transfer)] = end
        return True


def _before(passed: Pass) -> Pass | None:
    """Return the pass of the same stage and micro-batch that must come first, or None."""
    kind, microbatch, stage = passed
    earlier = {"backward": "forward", "weight": "backward"}.get(kind)
    return None if earlier is None else (earlier, microbatch, stage)


def _sent_by(transfer: Transfer) -> Pass:
    kind = "forward" if transfer.kind == "activation" else "backward"
    return kind, transfer.microbatch, transfer.source
