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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.pass_interleaving import yield_to_peer
from megatron.core.tensor_parallel.mappings import (
    all_gather_first_dim,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    through,
)
from megatron.core.transformer.moe.lazy_token_counts import LateCounts
from megatron.core.transformer.moe.permute import Order, by_expert, combine, expand
from megatron.core.transformer.moe.routing import Routing

Back = Callable[[Tensor], Tensor]
Meanwhile = Callable[[], None]


@dataclass(frozen=True)
class DispatchedTokens:
    """What the experts of a rank have to compute.

    ``rows`` [m, h] and ``weights`` [m], those of an expert behind each other, ``counts`` of each
    expert.  ``back`` takes results [m, h] to the ranks and tokens they belong to: [n, h].
    """

    rows: Tensor
    weights: Tensor
    counts: Sequence[int]
    back: Back

    def padded(self, capacity: int) -> DispatchedTokens:
        """With rows of zeros behind those of each expert, ``capacity`` in all."""
        device, size = self.rows.device, len(self.counts) * capacity
        gaps = [0, *accumulate(capacity - count for count in self.counts[:-1])]
        place = torch.arange(len(self.rows), device=device) + _repeated(gaps, self.counts, device)
        rows = self.rows.new_zeros((size, self.rows.shape[1])).index_copy(0, place, self.rows)
        weights = self.weights.new_zeros(size).index_copy(0, place, self.weights)
        return DispatchedTokens(
            rows,
            weights,
            [capacity] * len(self.counts),
            lambda results: self.back(results.index_select(0, place)),
        )


class TokenDispatcher(ABC):
    """Collective over tp_ep: all its ranks dispatch, and take back, equally often."""

    fuses = False  # the order of rows is computed by one kernel, where a GPU has it

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
    def dispatch(
        self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        """Send tokens [n, h] to their experts.

        ``meanwhile`` is called while they travel, if they do; in backward what it has computed is
        differentiated while gradients travel.
        """


class LocalDispatcher(TokenDispatcher):
    """All experts are on this rank, whose host asks for no number that it can do without."""

    def dispatch(
        self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        if routing.capacity is None and is_in_a_gpu(x):
            return sorted_here(x, routing, LateCounts(routing.counts()), fuses=self.fuses)
        return sorted_here(x, routing, counts_of(routing, self.num_experts)[0], fuses=self.fuses)


class AllGatherDispatcher(TokenDispatcher):
    """Every rank sees all tokens and picks those of its experts."""

    def dispatch(
        self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        assert meanwhile is None, "the command line is refused"
        group = self.tp_ep
        x = gather_from_sequence_parallel_region(x, group=group)
        weights = gather_from_sequence_parallel_region(routing.weights, group=group)
        experts = all_gather_first_dim(routing.experts, group)
        first = self.local_experts.start
        is_mine = (experts >= first) & (experts < self.local_experts.stop)
        mine = (experts - first).masked_fill(~is_mine, self.num_local)
        here = Routing(mine, weights, self.num_local)
        arrived = sorted_here(x, here, counts_of(here, self.num_experts)[0], fuses=self.fuses)

        def back(rows: Tensor) -> Tensor:
            return reduce_scatter_to_sequence_parallel_region(arrived.back(rows), group)

        return DispatchedTokens(arrived.rows, arrived.weights, arrived.counts, back)


class AllToAllDispatcher(TokenDispatcher):
    """Rows go to the rank of their expert, and from there to the ranks with shares of it."""

    def dispatch(
        self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        told = counts_of(routing, self.num_experts, self.tp_ep)
        arrived = sorted_here(x, routing, told[self.tp_ep.rank()], fuses=self.fuses)
        copies, mine = self.expt_tp.size(), self.local_experts
        if self.ep.size() > 1:
            arrived = _sent(arrived, self.ep, told[self.expt_tp.rank() :: copies], meanwhile)
            meanwhile = None
        held = [
            [sum(rows[expert] for rows in told[share::copies]) for expert in mine]
            for share in range(copies)
        ]
        return _sent(arrived, self.expt_tp, held, meanwhile, num_blocks=1)


class FlexDispatcher(TokenDispatcher):
    """Rows go to all ranks with shares of their expert at once."""

    def dispatch(
        self, x: Tensor, routing: Routing, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        told = counts_of(routing, self.num_experts, self.tp_ep)
        arrived = sorted_here(x, routing, told[self.tp_ep.rank()], fuses=self.fuses)
        return _sent(arrived, self.tp_ep, told, meanwhile, num_blocks=self.ep.size())


DISPATCHERS: dict[str, type[TokenDispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "flex": FlexDispatcher,
}


def counts_of(
    routing: Routing, num_experts: int, group: ProcessGroup | None = None
) -> list[list[int]]:
    """Rows of each expert of ``routing`` on each rank of ``group``; without one, on this rank.

    ``routing`` may name some of ``num_experts``.  Waits for the device, once.  Collective.
    """
    del num_experts  # the planner, which has no numbers, takes its share
    counts = routing.counts().unsqueeze(0)
    rows: list[list[int]] = (all_gather_first_dim(counts, group) if group else counts).tolist()
    return rows


def is_in_a_gpu(x: Tensor) -> bool:
    """Whether the host would wait for numbers of ``x``."""
    return device.launches_kernels(x.device)


def sorted_here(
    x: Tensor, routing: Routing, counts: Sequence[int], *, fuses: bool = False
) -> DispatchedTokens:
    """Rows of the tokens at hand in the order of experts, without those that are dropped.

    With `LateCounts` none may be.
    """
    num_rows = None if isinstance(counts, LateCounts) else sum(counts)
    order = by_expert(routing.experts, num_rows, highest=routing.num_experts if fuses else None)
    weights = routing.weights.flatten().index_select(0, order.visit)
    return DispatchedTokens(expand(x, order), weights, counts, partial(combine, order=order))


def _sent(
    arrived: DispatchedTokens,
    group: ProcessGroup,
    told: list[list[int]],
    meanwhile: Meanwhile | None,
    *,
    num_blocks: int | None = None,
) -> DispatchedTokens:
    """Rows, cut by expert into ``num_blocks`` blocks, sent to the ranks that compute the block.

    ``told``: counts of each rank of ``group``.  Without ``num_blocks`` each has a block.  With
    fewer blocks than ranks, neighbours share a block: each of them gets its rows.
    """
    size, counts, device = group.size(), arrived.counts, arrived.rows.device
    if size == 1:
        return arrived
    num_blocks = num_blocks or size
    num_local, copies = len(counts) // num_blocks, size // num_blocks
    first = group.rank() // copies * num_local
    coming = [row[first : first + num_local] for row in told]  # of each rank, for each expert
    blocks = [sum(counts[i : i + num_local]) for i in range(0, len(counts), num_local)]
    sending = [rows for rows in blocks for _ in range(copies)]
    receiving = [sum(row) for row in coming]
    doubled = _copies_of_blocks(blocks, copies, device)
    # What comes in lies by rank, then by expert; the experts want it by expert.
    experts = [number for _ in range(size) for number in range(num_local)]
    sorting = by_expert(_repeated(experts, [n for row in coming for n in row], device).unsqueeze(1))

    def back(rows: Tensor) -> Tensor:
        (rows,) = _Exchange.apply(receiving, sending, group, combine(rows, sorting))
        return arrived.back(rows if doubled is None else combine(rows, doubled))

    weights, rows = arrived.weights.unsqueeze(1), arrived.rows
    if doubled is not None:
        weights, rows = expand(weights, doubled), expand(rows, doubled)
    if meanwhile is None:
        weights, rows = _Exchange.apply(sending, receiving, group, weights, rows)
    else:
        (weights,) = _Exchange.apply(sending, receiving, group, weights)
        flight = _Flight(sending, receiving, group)
        # Backward takes the nodes that were made last first: those of `meanwhile` come when the
        # second one here has sent the gradient off, and before the first one waits for it.
        rows = through(rows, flight, lambda x, f: f.start(x), lambda _, f: f.wait())
        meanwhile()
        rows = through(rows, flight, _landed, _sent_off)
    counts = [sum(n) for n in zip(*coming, strict=True)]
    return DispatchedTokens(
        expand(rows, sorting), expand(weights, sorting).squeeze(1), counts, back
    )


def _copies_of_blocks(sizes: list[int], copies: int, device: torch.device) -> Order | None:
    """Each block of rows ``copies`` times behind itself; None where once is enough."""
    if copies == 1:
        return None
    block = _repeated(range(len(sizes)), sizes, device)
    # Visits to (block, copy), numbered so that sorting by number lays them out as they are sent.
    visits = block.unsqueeze(1) * copies + torch.arange(copies, device=device)
    return by_expert(visits)


def _repeated(numbers: Sequence[int], times: Sequence[int], device: torch.device) -> Tensor:
    """Each number so many times: [sum of ``times``]."""
    numbers_, times_ = torch.tensor([numbers, times], device=device)
    return numbers_.repeat_interleave(times_, output_size=sum(times))


class _Exchange(torch.autograd.Function):
    """All-to-all of several tensors with the same counts of rows per rank."""

    @staticmethod
    def forward(
        ctx: Any, sending: list[int], receiving: list[int], group: ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.args = sending, receiving, group
        return _exchanged(sending, receiving, group, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sending, receiving, group = ctx.args
        return None, None, None, *_exchanged(receiving, sending, group, grads)


def _exchanged(
    sending: list[int], receiving: list[int], group: ProcessGroup, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """While they travel another pass may compute."""
    flights = [_Flight(sending, receiving, group) for _ in tensors]
    for flight, tensor in zip(flights, tensors, strict=True):
        flight.start(tensor)
    yield_to_peer()
    return tuple(flight.wait() for flight in flights)


class _Flight:
    """All-to-all of rows that is under way from ``start`` to ``wait``; the next one goes back."""

    def __init__(self, sending: list[int], receiving: list[int], group: ProcessGroup) -> None:
        self.sizes, self.group = (sending, receiving), group

    def start(self, rows: Tensor) -> Tensor:
        """What comes in; it is not there yet."""
        sending, receiving = self.sizes
        self.rows = rows.contiguous()  # kept alive
        self.arriving = rows.new_empty((sum(receiving), *rows.shape[1:]))
        self.work = dist.all_to_all_single(
            self.arriving, self.rows, receiving, sending, group=self.group, async_op=True
        )
        self.sizes = receiving, sending
        return self.arriving

    def wait(self) -> Tensor:
        """What has come in."""
        self.work.wait()
        arrived = self.arriving
        del self.rows, self.arriving, self.work
        return arrived


def _landed(rows: Tensor, flight: _Flight) -> Tensor:
    flight.wait()
    return rows.view_as(rows)


def _sent_off(grad: Tensor, flight: _Flight) -> Tensor:
    flight.start(grad)
    return grad  # of the right shape; what comes in is waited for by who began the flight
