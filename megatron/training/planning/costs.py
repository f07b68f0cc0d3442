"""Costs of a rank: of its passes, and their sums along a rank's instructions.  No torch.

`activation_peak` adds up the memory of a step, `volumes` the bytes that it sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.pipeline_parallel.plan import (
    Instruction,
    PassKind,
    Placement,
    Transfer,
    TransferBatch,
    Work,
)


class Collective(NamedTuple):
    """One collective or send between ranks."""

    kind: str
    group: str  # name of the process group
    group_size: int
    num_bytes: int  # of the largest tensor: complete input or output of a rank

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends, with ring algorithms."""
        share = (self.group_size - 1) / self.group_size
        factors = {"all-reduce": 2 * share, "send": 1.0, "broadcast": 1.0}
        return self.num_bytes * factors.get(self.kind, share)


@dataclass(frozen=True, kw_only=True)
class State:
    """Bytes that a rank holds between steps; ``host``: optimizer state in host memory."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Cost of one pass of one micro-batch through one chunk.

    Bytes are relative to those alive before the pass, tensors received from other stages included.
    """

    peak: int
    kept: int  # after it, without ``gathered``; negative if more is freed than made
    handed_on: int  # additional: the tensor for another stage, until it is sent
    sent: Counter[Collective]  # between ranks of a stage
    # FSDP weights that stay gathered between the chunk's forward and its next backward pass, once
    # for all micro-batches.
    gathered: int = 0


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """Cost of one step on a rank, pass by pass."""

    state: State
    num_parameters: int
    passes: dict[tuple[PassKind, int], PassCost]  # of (kind, chunk)
    message: int  # bytes between two stages
    lasting: int  # bytes of tables that the first passes have allocated
    step_peak: int  # bytes of the optimizer's step, above ``state`` and ``lasting``
    step_sent: Counter[Collective]  # once a step
    axes: dict[str, str]  # name of a process group -> axis


def activation_peak(
    instructions: Sequence[Instruction],
    placement: Placement,
    pipeline_rank: int,
    cost: RankCost,
    *,
    first_deferred: int = 0,
) -> int:
    """Return the peak bytes of a step besides the rank's state.

    From micro-batch ``first_deferred`` on, tensors that a backward pass of the last stage keeps for
    the deferred weight gradient (--defer-embedding-wgrad-compute) stay until the end of the step.
    """
    alive = peak = leaving = 0
    ready: dict[Transfer, int] = {}  # bytes that are freed once they are sent
    gathered: dict[int, int] = {}  # bytes by chunk
    for item in instructions:
        if isinstance(item, TransferBatch):
            alive += len(item.receives) * cost.message
            peak = max(peak, alive + sum(gathered.values()))
            alive -= leaving
            leaving = sum(ready.pop(transfer) for transfer in item.sends)
            continue
        done = cost.passes[item.kind, item.chunk]
        # A forward pass's peak includes the weights it gathers; backward starts with them.
        gathered[item.chunk] = 0 if item.kind == "forward" else done.gathered
        peak = max(peak, alive + sum(gathered.values()) + done.peak)
        gathered[item.chunk] = done.gathered if item.kind == "forward" else 0
        kept = done.kept
        if item.kind == "backward" and item.microbatch < first_deferred:
            kept = min(kept, -cost.passes["forward", item.chunk].kept - cost.message)
        alive += kept + done.handed_on
        stage = placement.stage(pipeline_rank, item.chunk)
        ready[_from(item, stage)] = done.handed_on
    return cost.lasting + max(peak, cost.step_peak)


def _from(work: Work, stage: int) -> Transfer:
    if work.kind == "forward":
        return Transfer("activation", work.microbatch, stage, stage + 1)
    return Transfer("gradient", work.microbatch, stage, stage - 1)


AXES = ("tp", "cp", "pp", "dp", "ep", "embedding", "other")


@dataclass
class Volume:
    """Number of operations and bytes sent along one axis."""

    operations: float = 0.0
    sent_bytes: float = 0.0


def volumes(
    instructions: Sequence[Instruction], cost: RankCost, times: float = 1.0
) -> dict[str, Volume]:
    """Return what one rank sends along each axis in a step.

    The step executes ``instructions`` ``times`` over, and the operations of `RankCost.step_sent`
    once.
    """
    totals = {axis: Volume() for axis in AXES}
    for item in instructions:
        if isinstance(item, TransferBatch):
            totals["pp"].operations += len(item.sends) * times
            totals["pp"].sent_bytes += len(item.sends) * times * cost.message
        else:
            _add(totals, cost, cost.passes[item.kind, item.chunk].sent, times)
    _add(totals, cost, cost.step_sent, 1.0)
    return totals


def _add(
    totals: dict[str, Volume], cost: RankCost, sent: Counter[Collective], times: float
) -> None:
    for operation, count in sent.items():
        axis = cost.axes.get(operation.group, "other")
        # With two stages the embedding group is the pipeline group: a collective is no transfer.
        total = totals["embedding" if axis == "pp" else axis]
        total.operations += count * times
        total.sent_bytes += count * times * operation.sent_bytes
