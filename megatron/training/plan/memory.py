"""Peak memory of a step: costs of passes, added along a rank's instructions.  Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.pipeline_parallel.plan import (
    Instruction,
    Placement,
    Transfer,
    TransferBatch,
    Work,
)
from megatron.training.plan.cost import RankCost


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
