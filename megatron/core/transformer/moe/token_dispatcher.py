"""Token dispatchers: send tokens to the ranks of their experts, and return the results.

Ranks of an ``ep`` group hold E/ep experts each; ranks of an ``expt_tp`` group hold shards of the
same experts, and each needs all tokens of these experts.  ``n`` tokens of width ``h`` on this rank,
``m`` rows (one per token and chosen expert) for its experts.

    allgather  all-gather of all tokens over tp_ep; reduce-scatter of all results
    alltoall   all-to-all over ep, then over expt_tp; back in reverse, adding the shards' results
    flex       as alltoall, unless DeepEP dispatches (`deep_ep`)

Order of collectives: all dispatchers first all-gather the row counts over tp_ep if they need them
(the host waits for this once per layer, since all-to-all sizes are host integers).  An all-to-all
sends weights before rows.  Backward runs the reverse collectives in reverse order.

A visit is a pair (token, chosen expert).  A token with k visits becomes k rows, which are sorted by
expert, then by token.  Forward and backward only gather rows, never scatter-add them, so the order
of summation is fixed and results are deterministic on every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.fusions import kernels
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel.pass_interleaving import yield_to_peer
from megatron.core.tensor_parallel.mappings import (
    all_gather_first_dim,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    through,
)
from megatron.core.transformer.moe.grouped_linear import LazyTokenCounts, RowGroups
from megatron.core.transformer.moe.routing import RoutingResult


@dataclass(frozen=True)
class Order:
    """The permutation between visits and rows.

    ``visit`` [m]: index of each row's visit among the n x k visits.  ``row`` [n, k]: row of each
    visit; m or more for visits without a row (dropped tokens, experts of other ranks), which there
    may be if ``is_partial``.
    """

    visit: Tensor
    row: Tensor
    is_partial: bool = False

    @property
    def token(self) -> Tensor:
        """Token of each row: [m]."""
        k = self.row.shape[1]
        return self.visit if k == 1 else self.visit // k


def by_expert(
    experts: Tensor,
    num_rows: int | None = None,
    *,
    highest: int | None = None,
    dropped: int | None = None,
) -> Order:
    """Sort the visits by expert number ``experts`` [n, k].

    ``num_rows`` keeps the first rows only: visits of the highest numbers get no row.  ``highest``
    (largest possible number) allows a GPU kernel that counts instead of sorting.  ``dropped``:
    visits with this number, the highest, belong to no row, even if ``num_rows`` leaves one.
    """
    flat = experts.flatten()
    if highest is not None and (fused := kernels.find("permute", flat)):
        visit, row = fused.order_by_expert(flat, highest)
    else:
        visit = torch.argsort(flat, stable=True)
        row = torch.empty_like(visit)
        row[visit] = torch.arange(len(visit), device=visit.device)
    visit = visit[:num_rows]
    if dropped is not None:
        row = row.masked_fill(flat == dropped, len(flat))
    return Order(visit, row.view_as(experts), dropped is not None or len(visit) < len(flat))


def expand(x: Tensor, order: Order) -> Tensor:
    """Copy each token to the rows of its visits: [n, ...] -> [m, ...]."""
    return through(x, order, _rows_of_visits, _sum_of_rows)


def combine(rows: Tensor, order: Order) -> Tensor:
    """Sum the rows of each token: [m, ...] -> [n, ...]."""
    return through(rows, order, _sum_of_rows, _rows_of_visits)


def _rows_of_visits(x: Tensor, order: Order) -> Tensor:
    return x.index_select(0, order.token)


def _sum_of_rows(rows: Tensor, order: Order) -> Tensor:
    if rows.dim() == 2 and rows.is_contiguous() and (fused := kernels.find("permute", rows)):
        total: Tensor = fused.sum_of_rows(rows, order.row)
        return total
    if order.is_partial:
        rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
    first, *others = order.row.clamp(max=len(rows) - 1).unbind(1)
    total = rows.index_select(0, first)
    for other in others:
        total += rows.index_select(0, other)
    return total


Meanwhile = Callable[[], None]


@dataclass(frozen=True)
class DispatchedTokens:
    """The input of a rank's experts.

    ``rows`` [m, h] and ``weights`` [m], sorted by expert, ``counts`` rows per expert.  ``back``
    returns results [m, h] to the ranks and tokens they belong to, summed per token: [n, h].  With
    `LazyTokenCounts` there may be a tail: rows after those of the last expert, which belong to no
    expert.  ``back`` ignores their results, which may be undefined, as their gradients may be.
    """

    rows: Tensor
    weights: Tensor
    counts: Sequence[int]
    back: Callable[[Tensor], Tensor]

    def padded(self, capacity: int) -> DispatchedTokens:
        """Pad the rows of each expert with zeros to ``capacity``, and remove the tail."""
        num_rows = len(self.rows)
        num_experts = len(self.counts)
        where = self.rows.device
        size = num_experts * capacity
        groups = RowGroups.on(where, self.counts)
        row = torch.arange(num_rows, dtype=torch.int32, device=where)
        expert = groups.expert_of(row)
        begin = F.pad(groups.ends, (1, 0)).index_select(0, expert)
        place = (expert * capacity + row - begin).clamp(max=size)  # size: the row has no place
        row_at = row.new_full((size + 1,), num_rows).index_copy_(0, place, row)[:-1]
        order = Order(place.clamp(max=size - 1), row_at.unsqueeze(1), is_partial=True)
        return DispatchedTokens(
            combine(self.rows, order),
            combine(self.weights, order),
            [capacity] * num_experts,
            lambda results: self.back(expand(results, order)),
        )

    def without_tail(self) -> DispatchedTokens:
        """Remove the tail.  The host reads the counts."""
        counts = list(self.counts)
        num_rows = sum(counts)
        missing = len(self.rows) - num_rows
        if not missing:
            return self
        return DispatchedTokens(
            self.rows[:num_rows],
            self.weights[:num_rows],
            counts,
            lambda results: self.back(F.pad(results, (0, 0, 0, missing))),
        )


class TokenDispatcher(ABC):
    """Interface of dispatchers.  Collective over tp_ep: all its ranks make the same calls."""

    def __init__(self, num_experts: int, groups: ProcessGroupCollection) -> None:
        self.num_experts = num_experts
        self.ep, self.expt_tp, self.tp_ep = groups.ep, groups.expt_tp, groups.tp_ep
        self.num_local = num_experts // self.ep.size()
        first = self.ep.rank() * self.num_local
        self.local_experts = range(first, first + self.num_local)
        self.count_rows: Callable[..., list[list[int]]] = counts_of
        # Number of micro-batches whose tokens the ranks of tp_ep hold; each is sharded over a
        # tp_cp group.
        here, spread = self.tp_ep.size(), groups.tp_cp.size()
        self.num_micro_batches = -(-here // spread)
        if here % spread and spread % here:  # tp_ep may begin and end inside a micro-batch
            self.num_micro_batches += 1

    @abstractmethod
    def dispatch(
        self, x: Tensor, routing: RoutingResult, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        """Send tokens [n, h] to the ranks of their experts.

        ``meanwhile`` is called between starting and waiting for the all-to-all of the rows, if
        there is one; in backward its operations run while the gradients of the rows are sent.
        """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return this rank's tokens of each expert; projects replace it, and nothing calls it."""
        return routing_map.sum(0)


class LocalDispatcher(TokenDispatcher):
    """All experts are on this rank; on a GPU the host does not read the counts."""

    def dispatch(
        self, x: Tensor, routing: RoutingResult, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        if is_in_a_gpu(x):
            return sorted_here(x, routing, LazyTokenCounts(routing.counts()))
        return sorted_here(x, routing, self.count_rows(routing, None)[0])


class AllGatherDispatcher(TokenDispatcher):
    """All-gather all tokens; every rank selects those of its experts."""

    def dispatch(
        self, x: Tensor, routing: RoutingResult, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        group = self.tp_ep
        x = gather_from_sequence_parallel_region(x, group=group)
        weights = gather_from_sequence_parallel_region(routing.weights, group=group)
        experts = all_gather_first_dim(routing.experts, group)
        mine = experts - self.local_experts.start
        mine = mine.masked_fill((mine < 0) | (mine > self.num_local), self.num_local)
        here = RoutingResult(mine, weights, self.num_local)
        arrived = sorted_here(x, here, self.count_rows(here, None)[0])

        def back(rows: Tensor) -> Tensor:
            return reduce_scatter_to_sequence_parallel_region(arrived.back(rows), group)

        return DispatchedTokens(arrived.rows, arrived.weights, arrived.counts, back)


class AllToAllDispatcher(TokenDispatcher):
    """All-to-all over ep to one rank per expert, then over expt_tp to the expert's other shards."""

    def dispatch(
        self, x: Tensor, routing: RoutingResult, meanwhile: Meanwhile | None = None
    ) -> DispatchedTokens:
        row_counts = self.count_rows(routing, self.tp_ep)
        arrived = sorted_here(x, routing, row_counts[self.tp_ep.rank()])
        copies, mine = self.expt_tp.size(), self.local_experts
        if self.ep.size() > 1:
            arrived = _sent(arrived, self.ep, row_counts[self.expt_tp.rank() :: copies], meanwhile)
            meanwhile = None
        held = [
            [sum(rows[expert] for rows in row_counts[share::copies]) for expert in mine]
            for share in range(copies)
        ]
        return _sent(arrived, self.expt_tp, held, meanwhile, to_all=True)


DISPATCHERS: dict[str, type[TokenDispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "flex": AllToAllDispatcher,
}


def counts_of(routing: RoutingResult, group: ProcessGroup | None = None) -> list[list[int]]:
    """Return [rank][expert] row counts of ``routing``; without ``group``, of this rank alone.

    Waits for the device once.  Collective over ``group``.
    """
    counts = routing.counts().unsqueeze(0)
    rows: list[list[int]] = (all_gather_first_dim(counts, group) if group else counts).tolist()
    return rows


def is_in_a_gpu(x: Tensor) -> bool:
    """Return whether reading values of ``x`` would make the host wait for the device."""
    return device.launches_kernels(x.device)


def sorted_here(x: Tensor, routing: RoutingResult, counts: Sequence[int]) -> DispatchedTokens:
    """Return the local tokens' rows sorted by expert, without dropped ones.

    With `LazyTokenCounts` the host does not know how many tokens are dropped: there are as many
    rows as there can be, and those of dropped tokens are the tail.
    """
    num_rows = dropped = None
    if not isinstance(counts, LazyTokenCounts):
        num_rows = sum(counts)
    elif routing.may_have_dropped:
        dropped = routing.num_experts
        num_rows = None if routing.capacity is None else dropped * routing.capacity
    order = by_expert(routing.experts, num_rows, highest=routing.num_experts, dropped=dropped)
    weights = routing.weights.flatten().index_select(0, order.visit)
    return DispatchedTokens(expand(x, order), weights, counts, partial(combine, order=order))


def _sent(
    arrived: DispatchedTokens,
    group: ProcessGroup,
    row_counts: list[list[int]],
    meanwhile: Meanwhile | None,
    *,
    to_all: bool = False,
) -> DispatchedTokens:
    """Send rows to the ranks that compute them; ``row_counts``: for each rank of ``group``.

    Ranks hold consecutive experts and receive the rows of these, or ``to_all``: each rank computes
    with all experts and receives all rows.
    """
    size, counts, where = group.size(), arrived.counts, arrived.rows.device
    if size == 1:
        return arrived
    num_local = len(counts) if to_all else len(counts) // size
    first = 0 if to_all else group.rank() * num_local
    coming = [row[first : first + num_local] for row in row_counts]  # [source rank][local expert]
    sending = [sum(counts[i : i + num_local]) for i in range(0, len(counts), num_local)]
    sending *= size if to_all else 1
    receiving = [sum(row) for row in coming]
    # Received rows are sorted by source rank, then by expert; sort them by expert alone.
    by_source = _repeated([*range(num_local)] * size, sum(coming, []), where)
    sorting = by_expert(by_source.unsqueeze(1), highest=num_local - 1)

    def back(rows: Tensor) -> Tensor:
        (rows,) = _AllToAll.apply([_Flight(receiving, sending, group)], combine(rows, sorting))
        return arrived.back(rows.unflatten(0, (size, -1)).sum(0) if to_all else rows)

    weights, rows = arrived.weights.unsqueeze(1), arrived.rows
    if to_all:
        weights, rows = weights.repeat(size, 1), rows.repeat(size, 1)
    flight_of_weights, flight = (_Flight(sending, receiving, group) for _ in range(2))
    if meanwhile is None:
        weights, rows = _AllToAll.apply([flight_of_weights, flight], weights, rows)
    else:
        (weights,) = _AllToAll.apply([flight_of_weights], weights)
        # Autograd runs the nodes created last first: the second node below starts the all-to-all of
        # the gradients, then the nodes of `meanwhile` run, then the first node waits.
        rows = through(rows, flight, lambda x, f: f.start(x), lambda _, f: f.wait())
        meanwhile()
        rows = through(rows, flight, _landed, _sent_off)
    counts = [sum(n) for n in zip(*coming, strict=True)]
    return DispatchedTokens(
        expand(rows, sorting), expand(weights, sorting).squeeze(1), counts, back
    )


def _repeated(numbers: Sequence[int], times: Sequence[int], where: torch.device) -> Tensor:
    """Return each number repeated its number of ``times``: [sum of ``times``].

    The host does not wait for ``where``, neither for the copy nor for the size of the result.
    """
    here = device.host_array(torch.tensor([numbers, times]), where)
    both = here.to(where, non_blocking=True)
    return both[0].repeat_interleave(both[1], output_size=sum(times))


class _AllToAll(Function[tuple[Tensor, ...]]):
    """All-to-all of several tensors, of a flight each; the gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Context[list[_Flight]], flights: list[_Flight], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.values = flights
        return _all_to_all(flights, tensors)

    @staticmethod
    def backward(ctx: Context[list[_Flight]], *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Flights of their own: a graph that is retained runs backward again with the same sizes.
        back = [_Flight(*flight.sizes, flight.group) for flight in ctx.values]
        return None, *_all_to_all(back, grads)


def _all_to_all(flights: list[_Flight], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the all-to-alls; between start and wait an interleaved pass may compute."""
    for flight, tensor in zip(flights, tensors, strict=True):
        flight.start(tensor)
    yield_to_peer()
    return tuple(flight.wait() for flight in flights)


class _Flight:
    """An asynchronous all-to-all of rows from ``start`` to ``wait``, with sizes by rank.

    ``start`` swaps the sizes, so that the next ``start`` (of the gradients) runs it in reverse.
    """

    def __init__(self, sending: list[int], receiving: list[int], group: ProcessGroup) -> None:
        self.sizes = (sending, receiving)
        self.group = group

    def start(self, rows: Tensor) -> Tensor:
        """Start the all-to-all; return its output, whose values are undefined before `wait`."""
        sending, receiving = self.sizes
        self.rows = rows.contiguous()  # must stay allocated until `wait`
        self.arriving = rows.new_empty((sum(receiving), *rows.shape[1:]))
        self.work = dist.all_to_all_single(
            self.arriving, self.rows, receiving, sending, group=self.group, async_op=True
        )
        self.sizes = receiving, sending
        return self.arriving

    def wait(self) -> Tensor:
        """Wait for the all-to-all; return its output and drop the references to both buffers."""
        self.work.wait()
        arrived = self.arriving
        del self.rows, self.arriving, self.work
        return arrived


def _landed(rows: Tensor, flight: _Flight) -> Tensor:
    flight.wait()
    return rows.view_as(rows)


def _sent_off(grad: Tensor, flight: _Flight) -> Tensor:
    flight.start(grad)
    return grad  # a placeholder of the right shape: the first node returns the received gradient
