"""Collectives of tensor parallelism, with gradients.

``s`` tokens, ``b`` sequences, ``h`` hidden size; ``x/tp`` is the share of ``x`` that this rank
holds.  Every communication in the table is collective over the group.  In a group of one rank all
functions return their input.

    region pair           forward                                   backward
    copy                  nothing                                   all-reduce
    reduce                all-reduce                                nothing
    gather  last dim      all-gather            [.., h/tp] -> [.., h]   keep own slice
    scatter last dim      keep own slice        [.., h] -> [.., h/tp]   all-gather
    gather  last dim *    all-gather            [.., h/tp] -> [.., h]   reduce-scatter
    reduce-scatter last   reduce-scatter        [.., h] -> [.., h/tp]   all-gather
    gather  sequence      all-gather            [s/tp, ..] -> [s, ..]   reduce-scatter or slice
    scatter sequence      keep own slice        [s, ..] -> [s/tp, ..]   all-gather
    reduce-scatter seq.   reduce-scatter        [s, ..] -> [s/tp, ..]   all-gather
    all-to-all            part i to rank i      [tp, ..] -> [tp, ..]    the same

* ``all_gather_last_dim_from_tensor_parallel_region``: each rank's gradient is a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.parallel.collectives import all_gather_single as all_gather_single
from megatron.core.parallel.collectives import reduce_scatter_single as reduce_scatter_single
from megatron.core.parallel.default_groups import library_call

T = TypeVar("T")
Move = Callable[[Tensor, T], Tensor]

# -- plain collectives, no gradient ---------------------------------------------------------


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; return a new tensor, or ``x`` itself in a group of one rank."""
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_gather_first_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate [n, ...] of every rank along dim 0: [n * size, ...]."""
    size = group.size()
    if size == 1:
        return x
    rows, *rest = x.shape
    out = x.new_empty((rows * size, *rest))
    all_gather_single(out, x.contiguous(), group=group)
    return out


def all_gather_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate [..., n] of every rank along the last dim: [..., n * size]."""
    if group.size() == 1:
        return x
    return all_gather_first_dim(x, group).view(group.size(), *x.shape).movedim(0, -2).flatten(-2)


def reduce_scatter_first_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; each rank keeps its slice of dim 0: [n, ...] -> [n / size, ...]."""
    if group.size() == 1:
        return x
    rows, *rest = x.shape
    out = x.new_empty((_share(rows, group), *rest))
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


def reduce_scatter_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; each rank keeps its slice of the last dim: [..., n] -> [..., n / size].

    Copies ``x`` first: the collective scatters contiguous parts of dim 0 only.
    """
    if group.size() == 1:
        return x
    parts = x.unflatten(-1, (group.size(), _share(x.shape[-1], group))).movedim(-2, 0)
    return reduce_scatter_first_dim(parts, group).squeeze(0)


def _swap_rows(
    received: Sequence[int] | None, sent: Sequence[int] | None, x: Tensor, group: ProcessGroup
) -> Tensor:
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def slice_of_first_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part of dim 0 as a view: [n, ...] -> [n / size, ...]."""
    share = _share(x.shape[0], group)
    return x.narrow(0, group.rank() * share, share)


def _share(size: int, group: ProcessGroup) -> int:
    assert size % group.size() == 0, f"size {size} cannot be split over {group.size()} ranks"
    return size // group.size()


# -- with gradients -------------------------------------------------------------------------


class _Through(Function[Tensor], Generic[T]):
    @staticmethod
    def forward(
        ctx: Context[tuple[T, Move[T]]], x: Tensor, about: T, forth: Move[T], back: Move[T]
    ) -> Tensor:
        ctx.values = about, back
        return forth(x, about)

    @staticmethod
    def backward(ctx: Context[tuple[T, Move[T]]], grad: Tensor) -> tuple[Tensor, None, None, None]:
        about, back = ctx.values
        return back(grad, about), None, None, None


def through(x: Tensor, about: T, forth: Move[T], back: Move[T]) -> Tensor:
    """Return ``forth(x, about)``, a linear function of x; its backward is ``back(grad, about)``."""
    return _Through.call(x, about, forth, back)


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _own_first_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    return slice_of_first_dim(x, group).contiguous()


def _own_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    share = _share(x.shape[-1], group)
    return x.narrow(-1, group.rank() * share, share).contiguous()


def _move(
    x: Tensor, group: ProcessGroup, forth: Move[ProcessGroup], back: Move[ProcessGroup]
) -> Tensor:
    return x if group.size() == 1 else through(x, group, forth, back)


def _region(
    forth: Move[ProcessGroup], back: Move[ProcessGroup]
) -> Callable[[Tensor, ProcessGroup], Tensor]:
    """Return a function with this forward and backward; the identity in a group of one rank."""

    @library_call(unused="use_global_buffer")
    def region(input_: Tensor, group: ProcessGroup) -> Tensor:
        return _move(input_, group, forth, back)

    return region


copy_to_tensor_model_parallel_region = _region(_same, all_reduce)
reduce_from_tensor_model_parallel_region = _region(all_reduce, _same)
# For ranks that compute the same from the result: no gradients are summed.
gather_from_tensor_model_parallel_region = _region(all_gather_last_dim, _own_last_dim)
scatter_to_tensor_model_parallel_region = _region(_own_last_dim, all_gather_last_dim)
# For ranks that compute different things from the result: their gradients are summed.
all_gather_last_dim_from_tensor_parallel_region = _region(
    all_gather_last_dim, reduce_scatter_last_dim
)
reduce_scatter_last_dim_to_tensor_parallel_region = _region(
    reduce_scatter_last_dim, all_gather_last_dim
)
scatter_to_sequence_parallel_region = _region(_own_first_dim, all_gather_first_dim)
reduce_scatter_to_sequence_parallel_region = _region(reduce_scatter_first_dim, all_gather_first_dim)
# Part i of dim 0, [size, ...], is sent to, and received from, rank i.
_swap_first_dim = partial(_swap_rows, None, None)
all_to_all_first_dim = _region(_swap_first_dim, _swap_first_dim)


@library_call("input_ tensor_parallel_output_grad group", unused="use_global_buffer")
def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, *, group: ProcessGroup
) -> Tensor:
    """All-gather the first dimension: [s/tp, ...] -> [s, ...].

    With ``tensor_parallel_output_grad`` each rank's gradient is a partial sum and backward
    reduce-scatters; without, each rank has the complete gradient and keeps its slice.
    """
    back = reduce_scatter_first_dim if tensor_parallel_output_grad else _own_first_dim
    return _move(input_, group, all_gather_first_dim, back)


@library_call()
def all_to_all(
    group: ProcessGroup,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Send rows of dim 0 to each rank of the group, and receive rows from each.

    ``output_split_sizes_`` and ``input_split_sizes``: number of rows from and to each rank; by
    default equal parts.
    """
    received, sent = output_split_sizes_, input_split_sizes
    forth, back = partial(_swap_rows, received, sent), partial(_swap_rows, sent, received)
    return _move(input_, group, forth, back)
