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
from megatron.core.tensor_parallel.mappings import (
    all_gather_first_dim,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_first_dim,
    reduce_scatter_single,
    reduce_scatter_to_sequence_parallel_region,
)
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
    output_group: ProcessGroup | None = None,
    scatters_output: bool = False,
    quantizer: Quantizer | None = None,
    multiply: Multiply = F.linear,
) -> Tensor:
    """Compute x W^T + b.

    ``group``: ranks over which the input gradient is summed; None for a layer without collectives.
    ``output_group``: ranks over which the output is summed, by a reduce-scatter along dim 0 if
    ``scatters_output``.  ``is_own``: only this layer uses the weight, so backward may defer its
    gradient or add it to ``main_grad``.  ``quantizer``: runs the GEMMs in low precision.
    ``multiply``: runs the GEMM of the forward pass; it needs no gradient.  Collective over both
    groups.
    """
    if quantizer is not None:
        y = quantizer(x, weight, bias, group, sequence_parallel)
        return y if output_group is None else sum_output(y, output_group, scatters=scatters_output)
    asks = is_own and torch.is_grad_enabled() and (adds_to_main_grad(weight) or may_be_deferred())
    if group is None and not asks and multiply is F.linear:
        y = F.linear(x, weight, bias)
        return y if output_group is None else sum_output(y, output_group, scatters=scatters_output)
    call = LinearCall(weight, bias, is_own, group, sequence_parallel, output_group, scatters_output)
    return _Linear.call(x, weight, bias, call, multiply)


class LinearCall(NamedTuple):
    """The arguments of `linear` that backward needs besides saved tensors."""

    weight: Tensor  # the parameter object, which a queue and main_grad need
    bias: Tensor | None
    is_own: bool
    group: ProcessGroup | None
    sequence_parallel: bool
    output_group: ProcessGroup | None = None
    scatters_output: bool = False

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

    def summed(self, y: Tensor) -> Tensor:
        """Sum the output, which nothing else uses, over ``output_group``, whose ranks all call."""
        if self.output_group is None:
            return y
        if self.scatters_output:
            return reduce_scatter_first_dim(y, self.output_group)
        y = y.contiguous()
        dist.all_reduce(y, group=self.output_group)
        return y


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
        call: LinearCall,
        multiply: Multiply,
    ) -> Tensor:
        # The input is for the weight gradient alone: a frozen layer does not keep it.
        keeps_input = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if keeps_input else x.new_empty(0, 0), weight)
        ctx.values = call
        return call.summed(multiply(call.gathered(x), weight, bias))

    @staticmethod
    def backward(ctx: Context[LinearCall], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call = ctx.values
        if call.output_group is not None and call.scatters_output:
            grad = all_gather_first_dim(grad, call.output_group)
        item = WeightGrad(
            *call.params(ctx.needs_input_grad),
            grad,
            x,
            group=call.gather_group,
            is_own=call.is_own,
        )
        grad_x = partial(grad.matmul, weight) if ctx.needs_input_grad[0] else None
        return *linear_backward(item, grad_x, call), None, None


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


def sum_output(y: Tensor, group: ProcessGroup, *, scatters: bool) -> Tensor:
    """Sum ``y`` over the group, differentiably.  Collective."""
    if scatters:
        return reduce_scatter_to_sequence_parallel_region(y, group)
    return reduce_from_tensor_model_parallel_region(y, group)
