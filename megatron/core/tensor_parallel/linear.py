"""One linear layer: the GEMMs of forward and backward, overlapped with their communication.

Two parts vary.  `Gemms` is how the weight is stored and multiplied: in its own dtype (`DENSE`), in
8 or 4 bits for all GEMMs (`quantized_linear`) or for storage alone (`frozen_weight`).  `LinearCall`
says which ranks communicate, and whether a collective of sequence parallelism runs inside of its
GEMM (`Overlap`).

Collectives, in order: with sequence parallelism (SP) forward all-gathers the input before the GEMM;
backward all-gathers it again while it computes the input gradient, then reduces that gradient
(all-reduce, or reduce-scatter with SP) while it computes the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
# Computes a layer in place of torch's matmuls: low precision, generation, Transformer Engine.
Quantizer = Callable[[Tensor, "LinearCall"], Tensor]
Params = tuple[Tensor | None, Tensor | None]  # weight and bias that need a gradient


def linear(
    x: Tensor,
    call: LinearCall,
    quantizer: Quantizer | None = None,
) -> Tensor:
    """Compute x W^T + b.  Collective over the groups of ``call``.

    ``quantizer``: computes the layer in another way.
    """
    if quantizer is not None:
        return quantizer(x, call)
    weight = call.weight
    output_group = call.output_group
    may_defer = call.is_own and torch.is_grad_enabled()
    asks = may_defer and (adds_to_main_grad(weight) or may_be_deferred())
    if call.group is None and call.overlap is None and not asks:
        y = F.linear(x, weight, call.bias)
        if output_group is None:
            return y
        return sum_output(y, output_group, scatters=call.scatters_output)
    return linear_of(x, call, DENSE)


def linear_of(x: Tensor, call: LinearCall, gemms: Gemms) -> Tensor:
    """Compute x W^T + b by ``gemms``."""
    return _Linear.call(x, call.weight, call.bias, call, gemms)


class LinearCall(NamedTuple):
    """A linear layer with its parameters, and which of its tensors ranks hold in parts."""

    weight: Tensor  # the parameter object, which a queue and main_grad need
    bias: Tensor | None = None
    # Only this layer uses the weight: backward may defer its gradient or add it to main_grad.
    is_own: bool = True
    group: ProcessGroup | None = None  # over which the input gradient is summed
    sequence_parallel: bool = False  # the input is sharded over ``group``
    output_group: ProcessGroup | None = None  # over which the output is summed
    scatters_output: bool = False  # by a reduce-scatter along dim 0
    overlap: Overlap | None = None

    @property
    def gather_group(self) -> ProcessGroup | None:
        """The group over which the input is sharded, if it is."""
        return self.group if self.sequence_parallel else None

    def gathered(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks.  Collective under sequence parallelism."""
        return x if self.gather_group is None else all_gather_first_dim(x, self.gather_group)

    def summed(self, y: Tensor) -> Tensor:
        """Sum the output, which nothing else uses, over ``output_group``, whose ranks all call."""
        if self.output_group is None:
            return y
        if self.scatters_output:
            return reduce_scatter_first_dim(y, self.output_group)
        y = y.contiguous()
        dist.all_reduce(y, group=self.output_group)
        return y


Rows = Any  # what a GEMM reads of x or of a gradient: a Tensor [s, b, i], or a Scaled [t, i]
Matrix = Any  # a Tensor or Scaled [o, i], by whose transpose rows are multiplied


class Gemms:
    """The GEMMs of a layer with a weight in its own dtype; subclasses store it in another way."""

    def values(self, weight: Tensor) -> Tensor:
        """Return the values [o, i] of the layer's weight, in the dtype of ``weight``."""
        return weight

    def input(self, x: Tensor, call: LinearCall, keeps: bool) -> tuple[Rows, tuple[Tensor, ...]]:
        """Return the rows of ``x``, and what the weight gradient needs of it, if it ``keeps`` x."""
        return x, (x if keeps else x.new_empty(0, 0),)

    def gradient(self, grad: Tensor, saved: list[Tensor]) -> Rows:
        """Return the rows of the output gradient."""
        return grad

    def gather(self, rows: Rows, group: ProcessGroup) -> Rows:
        """All-gather rows.  Collective."""
        return all_gather_first_dim(rows, group)

    def matrix(self, weight: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Matrix:
        """Return the weight [o, i], or ``transposed`` [i, o], for rows of ``dtype``."""
        return weight.t() if transposed else weight

    def product(
        self, rows: Rows, matrix: Matrix, dtype: torch.dtype, bias: Tensor | None, forward: bool
    ) -> Tensor:
        """Multiply ``rows`` by the transpose of ``matrix``, in forward or in backward."""
        return F.linear(rows, matrix, bias) if forward else rows.matmul(matrix.t())

    def weight_grad(
        self,
        params: Params,
        grad: Tensor,
        rows: Rows,
        saved: list[Tensor],
        call: LinearCall,
    ) -> WeightGrad:
        """Return the gradients of ``params``, still to compute; ``rows`` are those of ``grad``."""
        (x,) = saved
        return WeightGrad(*params, rows, x, group=call.gather_group, is_own=call.is_own)


DENSE = Gemms()


@dataclass(frozen=True)
class Overlap:
    """Which collectives of a layer over ``group`` run inside of their GEMM, only with `DENSE`.

    torch divides such a GEMM by ranks: while one part is computed, the next is copied through
    symmetric memory, which the GPUs of a group map into each other's address space.  Each method is
    one collective over the group.
    """

    group: ProcessGroup
    gathers: bool  # all-gathers of inputs (column), and of output gradients (row)
    scatters: bool  # reduce-scatters of outputs (row)
    scatters_gradients: bool  # reduce-scatters of input gradients (column)

    def gathered_product(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of all ranks, and their product with the transpose of ``matrix``."""
        gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [matrix.t()], 0, self.group.group_name
        )
        return gathered, y if bias is None else y.add_(bias)

    def scattered_product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks of x @ matrix^T."""
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x.contiguous(), matrix.t(), "sum", 0, self.group.group_name
        )
        return y


class _Linear(Function[Tensor]):
    """x W^T + b with a weight gradient that may be deferred in a queue, if the weight is its own.

    Backward overlaps the communication of a column-parallel layer and its GEMMs.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[LinearCall, Gemms]],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: LinearCall,
        gemms: Gemms,
    ) -> Tensor:
        rows, saved = gemms.input(x, call, ctx.needs_input_grad[1])
        ctx.save_for_backward(weight, *saved)
        ctx.values = call, gemms
        overlap = call.overlap
        gather = call.gather_group
        if gather is not None and (overlap is None or not overlap.gathers):
            rows = gemms.gather(rows, gather)
            gather = None
        matrix = gemms.matrix(call.weight, x.dtype)
        if overlap is not None and gather is not None:
            _, y = overlap.gathered_product(rows, matrix, call.bias)
        elif overlap is not None and overlap.scatters and call.scatters_output:
            y = overlap.scattered_product(rows, matrix)
        else:
            y = call.summed(gemms.product(rows, matrix, x.dtype, call.bias, True))
        return _shaped(y, x)

    @staticmethod
    def backward(ctx: Context[tuple[LinearCall, Gemms]], grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        call, gemms = ctx.values
        overlap = call.overlap
        dtype = grad.dtype
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        term = None
        gather = call.output_group if call.scatters_output else None
        if gather and overlap and overlap.gathers:
            matrix = gemms.matrix(weight, dtype, transposed=True)
            rows, term = overlap.gathered_product(grad, matrix, None)
        else:
            grad = grad if gather is None else all_gather_first_dim(grad, gather)
            rows = gemms.gradient(grad, saved)

        def partial_grad_x() -> Tensor:
            if term is not None:
                return term
            matrix = gemms.matrix(weight, dtype, transposed=True)
            if overlap is not None and overlap.scatters_gradients and call.group is not None:
                return overlap.scattered_product(rows, matrix)
            return _shaped(gemms.product(rows, matrix, dtype, None, False), grad)

        params = call.weight if needs_weight else None, call.bias if needs_bias else None
        item = gemms.weight_grad(params, grad, rows, saved, call)
        return *linear_backward(item, partial_grad_x if needs_x else None, call), None, None


def _shaped(y: Tensor, like: Tensor) -> Tensor:
    """Return rows [t, o] as [s, b, o] if ``like`` has these dimensions."""
    return y if y.dim() == like.dim() else y.view(-1, *like.shape[1:-1], y.shape[-1])


def linear_backward(
    item: WeightGrad,
    partial_grad_x: Callable[[], Tensor] | None,
    call: LinearCall,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias; the last two are None if a queue took them.

    ``partial_grad_x`` computes this rank's term of the input gradient.  The terms are summed over
    the group of ``call`` (all-reduce, or reduce-scatter with SP) while the GEMM of the weight
    gradient runs, unless ``partial_grad_x`` overlaps with the sum itself.  Collective over the
    group.
    """
    is_later = is_deferred(item)
    if not is_later:
        item.start()
    reducing = grad_x = term = None
    if partial_grad_x is not None:
        grad_x = term = partial_grad_x()
        is_summed = call.overlap is not None and call.overlap.scatters_gradients
        if call.group is not None and not is_summed:
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
