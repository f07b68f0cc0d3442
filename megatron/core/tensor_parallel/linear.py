"""The product of a linear layer, its communication hidden behind matrix products.

Collectives, in order: under sequence parallelism (SP) the input is all-gathered before the product;
backward it is gathered again while the input gradient is computed, then that gradient is reduced
(all-reduce, or reduce-scatter under SP) while the weight gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
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
    return _Linear.apply(x, weight, bias, is_own, group, sequence_parallel)


class LinearCall(NamedTuple):
    """What backward of a linear layer needs besides saved tensors; arguments as in `linear`."""

    weight: Tensor  # itself, for a queue and for main_grad
    bias: Tensor | None
    is_own: bool
    group: ProcessGroup | None
    sequence_parallel: bool

    @property
    def gather_group(self) -> ProcessGroup | None:
        """The group over which the input is sharded, if it is."""
        return self.group if self.sequence_parallel else None

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks.  Collective under sequence parallelism."""
        return x if self.gather_group is None else all_gather_first_dim(x, self.gather_group)

    def params(self, needs_input_grad: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias, None where no gradient is needed; inputs are x, weight, bias, ..."""
        _, needs_weight, needs_bias, *_ = needs_input_grad
        return self.weight if needs_weight else None, self.bias if needs_bias else None


class _Linear(Function[Tensor]):
    """x W^T + b whose weight gradient may be left in a queue, where the weight ``is_own``.

    With ``group`` it is the matmul of a column layer, its communication hidden behind matmuls.
    """

    @staticmethod
    def forward(
        ctx: Context[LinearCall],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_own: bool,
        group: ProcessGroup | None,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.values = call = LinearCall(weight, bias, is_own, group, sequence_parallel)
        return F.linear(call.gathered(x), weight, bias)

    @staticmethod
    def backward(ctx: Context[LinearCall], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call = ctx.values
        weight_param, bias = call.params(ctx.needs_input_grad)
        item = WeightGrad(weight_param, bias, grad, x, group=call.gather_group, is_own=call.is_own)
        grad_x = partial(grad.matmul, weight) if ctx.needs_input_grad[0] else None
        return *linear_backward(item, grad_x, call), None, None, None


def linear_backward(
    item: WeightGrad,
    partial_grad_x: Callable[[], Tensor] | None,
    call: LinearCall,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias; the latter two None where a queue has taken them.

    ``partial_grad_x`` computes this rank's term of the input gradient, which is summed over
    the group of ``call`` (all-reduce, or reduce-scatter under SP) beside the weight gradient's
    GEMM.
    """
    is_later = is_deferred(item)
    if not is_later:
        item.start()
    reducing = grad_x = term = None
    if partial_grad_x is not None:
        grad_x = term = partial_grad_x()
        if call.group is not None:
            reducing, grad_x = start_reduction(term, call.group, call.sequence_parallel)
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
