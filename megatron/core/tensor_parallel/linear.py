"""The GEMMs of a linear layer, overlapped with their communication.

Collectives, in order: with sequence parallelism (SP) forward all-gathers the input before the GEMM;
backward all-gathers it again while it computes the input gradient, then reduces that gradient
(all-reduce, or reduce-scatter with SP) while it computes the weight gradient.
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

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # like F.linear
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
    multiply: Multiply = F.linear,
) -> Tensor:
    """Compute x W^T + b.

    ``group``: ranks over which the input gradient is summed; None for a layer without collectives.
    ``is_own``: only this layer uses the weight, so backward may defer its gradient or add it to
    ``main_grad``.  ``quantizer``: runs the GEMMs in low precision.  ``multiply``: runs the GEMM of
    the forward pass; it needs no gradient.  Collective over ``group``.
    """
    if quantizer is not None:
        return quantizer(x, weight, bias, group, sequence_parallel)
    asks = torch.is_grad_enabled() and (adds_to_main_grad(weight) or may_be_deferred())
    if group is None and not (is_own and asks) and multiply is F.linear:
        return F.linear(x, weight, bias)
    return _Linear.call(x, weight, bias, is_own, group, sequence_parallel, multiply)


class LinearCall(NamedTuple):
    """The arguments of `linear` that backward needs besides saved tensors."""

    weight: Tensor  # the parameter object, which a queue and main_grad need
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
        """Return weight and bias, None for one without gradient.

        ``needs_input_grad`` is that of an autograd function with inputs x, weight, bias, ...
        """
        _, needs_weight, needs_bias, *_ = needs_input_grad
        return self.weight if needs_weight else None, self.bias if needs_bias else None


class _Linear(Function[Tensor]):
    """x W^T + b with a weight gradient that may be deferred in a queue, if the weight ``is_own``.

    With ``group`` it is a column-parallel layer: backward overlaps communication and GEMMs.
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
        multiply: Multiply,
    ) -> Tensor:
        # The input is for the weight gradient alone: a frozen layer does not keep it.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else x.new_empty(0, 0), weight)
        ctx.values = call = LinearCall(weight, bias, is_own, group, sequence_parallel)
        return multiply(call.gathered(x), weight, bias)

    @staticmethod
    def backward(ctx: Context[LinearCall], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call = ctx.values
        weight_param, bias = call.params(ctx.needs_input_grad)
        item = WeightGrad(weight_param, bias, grad, x, group=call.gather_group, is_own=call.is_own)
        grad_x = partial(grad.matmul, weight) if ctx.needs_input_grad[0] else None
        return *linear_backward(item, grad_x, call), None, None, None, None


def linear_backward(
    item: WeightGrad,
    partial_grad_x: Callable[[], Tensor] | None,
    call: LinearCall,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias; the last two are None if a queue took them.

    ``partial_grad_x`` computes this rank's term of the input gradient.  The terms are summed over
    the group of ``call`` (all-reduce, or reduce-scatter with SP) while the GEMM of the weight
    gradient runs.  Collective over that group.
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
    del term  # the reduction reads it until `wait`
    return grad_x, *grads


def start_reduction(
    grad: Tensor, group: ProcessGroup, sequence_parallel: bool
) -> tuple[dist.Work, Tensor]:
    """Start to sum ``grad`` over the group; return the work to wait for and the output tensor.

    An all-reduce in place, or with ``sequence_parallel`` a reduce-scatter along dim 0.
    """
    if not sequence_parallel:
        return dist.all_reduce(grad, group=group, async_op=True), grad
    total = grad.new_empty((grad.shape[0] // group.size(), *grad.shape[1:]))
    return reduce_scatter_single(total, grad, group=group, async_op=True), total
