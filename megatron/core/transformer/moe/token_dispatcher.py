"""Brings tokens to their experts and results back.

Ranks of an ``ep`` group hold E/ep experts each; those of an ``expt_tp`` group hold shares of the
same experts, and each needs all their tokens.  ``n`` tokens of width ``h`` on this rank, ``m`` rows
for its experts.  Gradients travel the same way back.

    allgather  one all-gather over tp_ep of all tokens; one reduce-scatter of all results
    alltoall   rows over ep, then over expt_tp; results back, their shares summed
    flex       rows over tp_ep at once; results back, their shares summed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_gather_first_dim,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.permute import Order, by_expert, combine, expand
from megatron.core.transformer.moe.routing import Routing

Back = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Arrived:
    """What the experts of a rank have to compute.

    ``rows`` [m, h] and ``weights`` [m], those of an expert behind each other, ``counts`` of each
    expert.  ``back`` takes results [m, h] to the ranks and tokens they belong to: [n, h].
    """

    rows: Tensor
    weights: Tensor
    counts: list[int]
    back: Back

    def padded(self, capacity: int) -> Arrived:
        """With rows of zeros behind those of each expert, ``capacity`` in all."""
        where = self.rows.device
        counts = torch.tensor(self.counts, device=where)
        gaps = capacity * torch.arange(len(counts), device=where) - counts.cumsum(0) + counts
        place = torch.arange(len(self.rows), device=where) + gaps.repeat_interleave(counts)
        size = len(counts) * capacity
        rows = self.rows.new_zeros((size, self.rows.shape[1])).index_copy(0, place, self.rows)
        weights = self.weights.new_zeros(size).index_copy(0, place, self.weights)
        return Arrived(
            rows,
            weights,
            [capacity] * len(counts),
            lambda results: self.back(results.index_select(0, place)),
        )


class TokenDispatcher(ABC):
    """Collective over tp_ep: all its ranks dispatch, and take back, equally often."""

    def __init__(self, num_experts: int, groups: ProcessGroupCollection) -> None:
        self.num_experts = num_experts
        self.ep, self.expt_tp, self.tp_ep = groups.ep, groups.expt_tp, groups.tp_ep
        self.num_local = num_experts // self.ep.size()
        first = self.ep.rank() * self.num_local
        self.local_experts = range(first, first + self.num_local)
        # Micro-batches that ranks of tp_ep have tokens of: each is spread over a tp_cp.
        here, spread = self.tp_ep.size(), groups.tp_cp.size()
        self.num_micro_batches = -(-here // spread)
        if here % spread and spread % here:  # ranks at both ends of micro-batches
            self.num_micro_batches += 1

    @abstractmethod
    def dispatch(self, x: Tensor, routing: Routing) -> Arrived:
        """Send tokens [n, h] to their experts."""


class AllGatherDispatcher(TokenDispatcher):
    """Every rank sees all tokens and picks those of its experts."""

    def dispatch(self, x: Tensor, routing: Routing) -> Arrived:
        group = self.tp_ep
        x = gather_from_sequence_parallel_region(x, group=group)
        weights = gather_from_sequence_parallel_region(routing.weights, group=group)
        experts = all_gather_first_dim(routing.experts, group)
        first = self.local_experts.start
        is_mine = (experts >= first) & (experts < self.local_experts.stop)
        mine = (experts - first).masked_fill(~is_mine, self.num_local)
        arrived = _sorted_here(x, Routing(mine, weights, self.num_local))

        def back(rows: Tensor) -> Tensor:
            return reduce_scatter_to_sequence_parallel_region(arrived.back(rows), group)

        return Arrived(arrived.rows, arrived.weights, arrived.counts, back)


class AllToAllDispatcher(TokenDispatcher):
    """Rows go to the rank of their expert, and from there to the ranks with shares of it."""

    def dispatch(self, x: Tensor, routing: Routing) -> Arrived:
        arrived = _sorted_here(x, routing)
        arrived = _sent(arrived, self.ep, num_blocks=self.ep.size())
        return _sent(arrived, self.expt_tp, num_blocks=1)


class FlexDispatcher(TokenDispatcher):
    """Rows go to all ranks with shares of their expert at once."""

    def dispatch(self, x: Tensor, routing: Routing) -> Arrived:
        return _sent(_sorted_here(x, routing), self.tp_ep, num_blocks=self.ep.size())


DISPATCHERS: dict[str, type[TokenDispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "flex": FlexDispatcher,
}


def _sorted_here(x: Tensor, routing: Routing) -> Arrived:
    """Rows of the tokens at hand in the order of experts, without those that are dropped."""
    counts = routing.counts().tolist()
    order = by_expert(routing.experts, sum(counts))
    weights = routing.weights.flatten().index_select(0, order.visit)
    return Arrived(expand(x, order), weights, counts, partial(combine, order=order))


def _sent(arrived: Arrived, group: ProcessGroup, *, num_blocks: int) -> Arrived:
    """Rows, cut by expert into ``num_blocks`` blocks, sent to the ranks that compute the block.

    With fewer blocks than ranks, neighbours share a block: each of them gets its rows.
    """
    size = group.size()
    if size == 1:
        return arrived
    counts = torch.tensor(arrived.counts, device=arrived.rows.device)
    num_local, copies = len(counts) // num_blocks, size // num_blocks
    block = group.rank() // copies
    told = all_gather_first_dim(counts.unsqueeze(0), group)  # [rank, expert]
    coming = told[:, block * num_local : (block + 1) * num_local]
    sending = counts.view(num_blocks, num_local).sum(1).repeat_interleave(copies).tolist()
    receiving = coming.sum(1).tolist()
    doubled = _copies_of_blocks(counts.view(num_blocks, -1).sum(1), copies)
    # What comes in lies by rank, then by expert; the experts want it by expert.
    experts = torch.arange(num_local, device=counts.device).repeat(size)
    sorting = by_expert(experts.repeat_interleave(coming.flatten()).unsqueeze(1))

    def there(rows: Tensor) -> Tensor:
        rows = rows if doubled is None else expand(rows, doubled)
        return expand(_Exchange.apply(rows, sending, receiving, group), sorting)

    def back(rows: Tensor) -> Tensor:
        rows = _Exchange.apply(combine(rows, sorting), receiving, sending, group)
        return arrived.back(rows if doubled is None else combine(rows, doubled))

    weights = there(arrived.weights.unsqueeze(1)).squeeze(1)
    return Arrived(there(arrived.rows), weights, coming.sum(0).tolist(), back)


def _copies_of_blocks(sizes: Tensor, copies: int) -> Order | None:
    """Each block of rows ``copies`` times behind itself; None where once is enough."""
    if copies == 1:
        return None
    block = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    # Visits to (block, copy), numbered so that sorting by number lays them out as they are sent.
    visits = block.unsqueeze(1) * copies + torch.arange(copies, device=sizes.device)
    return by_expert(visits)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows with counts per rank."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sending: list[int], receiving: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.args = sending, receiving, group
        return _exchanged(rows, sending, receiving, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sending, receiving, group = ctx.args
        return _exchanged(grad, receiving, sending, group), None, None, None


def _exchanged(
    rows: Tensor, sending: list[int], receiving: list[int], group: ProcessGroup
) -> Tensor:
    out = rows.new_empty((sum(receiving), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receiving, sending, group=group)
    return out
