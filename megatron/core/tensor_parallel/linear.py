"""The product of a linear layer, its communication hidden behind matrix products.

Collectives, in order: under sequence parallelism (SP) the input is all-gathered before the product;
backward it is gathered again while the input gradient is computed, then that gradient is reduced
(all-reduce, or reduce-scatter under SP) while the weight gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.mappings import all_gather_first_dim, reduce_scatter_single
from megatron.core.tensor_parallel.weight_gradient import (
    WeightGrad,
    adds_to_main_grad,
    is_deferred,
    may_be_deferred,
)

Quantizer = Callable[[Tensor, Tensor, Tensor | None, ProcessGroup | None, bool], Tensor]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_own: bool = True,
    group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """x W^T + b, in torch's own form where nobody asks for more.

    ``group``: the input gradient is summed over it.  ``is_own``: only this layer uses the weight.
    """
    if quantizer is not None:
        return quantizer(x, weight, bias, group, sequence_parallel)
    asks = torch.is_grad_enabled() and (may_be_deferred() or adds_to_main_grad(weight))
    if group is None and not (is_own and asks):
        return F.linear(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, is_own, group, sequence_parallel)
    return y


class _Linear(torch.autograd.Function):
    """x W^T + b whose weight gradient may be left in a queue, where the weight ``is_own``.

    With ``group`` it is the matmul of a column layer, its communication hidden behind matmuls.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_own: bool,
        group: ProcessGroup | None,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.params = weight, bias  # themselves, for a queue and for main_grad
        ctx.is_own, ctx.group, ctx.sequence_parallel = is_own, group, sequence_parallel
        if sequence_parallel:
            assert group is not None, "which group cuts the sequence?"
            x = all_gather_first_dim(x, group)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[:3]
        params = [p if needed else None for p, needed in zip(ctx.params, needs, strict=True)]
        gather_group = ctx.group if ctx.sequence_parallel else None
        item = WeightGrad(*params, grad, x, group=gather_group, is_own=ctx.is_own)
        grad_x = partial(grad.matmul, weight) if needs_x else None
        grads = linear_backward(item, grad_x, ctx.group, sequence_parallel=ctx.sequence_parallel)
        return *grads, None, None, None


def linear_backward(
    item: WeightGrad,
    partial_grad_x: Callable[[], Tensor] | None,
    group: ProcessGroup | None,
    *,
    sequence_parallel: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias; the latter two None where a queue has taken them.

    ``partial_grad_x`` computes this rank's term of the input gradient, which is summed over
    ``group`` (all-reduce, or reduce-scatter under SP) beside the weight gradient's product.
    """
    is_later = is_deferred(item)
    if not is_later:
        item.start()
    reducing = grad_x = term = None
    if partial_grad_x is not None:
        grad_x = term = partial_grad_x()
        if group is not None:
            reducing, grad_x = start_reduction(term, group, sequence_parallel)
    grads = (None, None) if is_later else item.compute()
    if reducing is not None:
        reducing.wait()
    del term  # kept until the reduction had read it
    return grad_x, *grads


def start_reduction(
    grad: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> tuple[dist.Work, Tensor]:
    """Begin to sum ``grad`` over the group: the work to wait for, and where the sum will be."""
    if not sequence_parallel:
        return dist.all_reduce(grad, group=group, async_op=True), grad
    total = grad.new_empty((grad.shape[0] // group.size(), *grad.shape[1:]))
    return reduce_scatter_single(total, grad, group=group, async_op=True), total
