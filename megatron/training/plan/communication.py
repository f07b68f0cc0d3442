"""Bytes that a rank sends in a step along each axis of the layout.  Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.pipeline_parallel.plan import Instruction, TransferBatch
from megatron.training.plan.cost import Collective, RankCost

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
