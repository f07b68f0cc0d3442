"""`overlapped_linear` in fp8 with one scale per tensor: codes are gathered and multiplied as one.

Dimensions as in `quantized_linear`.  Recipes with blocks keep separate collectives: torch's fused
operations take one scale per tensor or per row (docs/log.md).

Collectives over the tensor-parallel group, in the order of `overlapped_linear`, and the amax
reductions of `quantized_linear`.  A row-parallel layer all-gathers the codes of its output gradient
instead of 16-bit values; their scale then has to be the same on all ranks, so current scaling
reduces the amax of the gradient first.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions.quantize import product
from megatron.core.low_precision import Scaled
from megatron.core.tensor_parallel.linear import LinearCall, linear_backward
from megatron.core.tensor_parallel.mappings import all_gather_first_dim, reduce_scatter_first_dim
from megatron.core.tensor_parallel.overlap import Overlap, scattering_backward
from megatron.core.tensor_parallel.quantized_linear import (
    GRADIENT,
    INPUT,
    LinearQuantizer,
    ScaledWeightGrad,
    turned_codes,
)
from megatron.core.tensor_parallel.weight_gradient import WeightGrad, is_deferred


def quantized_column_product(
    overlap: Overlap, quantizer: LinearQuantizer, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return x W^T + b of a column-parallel layer: [s/tp, b, i] -> [s, b, o/tp]."""
    return _ColumnProduct.apply(x, weight, bias, quantizer, overlap)


def quantized_row_product(
    overlap: Overlap, quantizer: LinearQuantizer, x: Tensor, weight: Tensor
) -> Tensor:
    """Return x W^T of a row-parallel layer, summed over ranks: [s, b, i/tp] -> [s/tp, b, o]."""
    return _RowProduct.apply(x, weight, quantizer, overlap)


class _Values(NamedTuple):
    call: LinearCall
    quantizer: LinearQuantizer
    overlap: Overlap


class _ColumnProduct(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_Values],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        quantizer: LinearQuantizer,
        overlap: Overlap,
    ) -> Tensor:
        flat = x.flatten(0, -2)
        rows = quantizer.rows(INPUT, flat, is_gathered=True)
        saves_codes = quantizer.recipe.wgrad and ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, *((rows.codes, rows.scale) if saves_codes else (flat,)))
        ctx.values = _Values(
            LinearCall(weight, bias, True, overlap.group, True), quantizer, overlap
        )
        codes = quantizer.weight(weight)
        _, y = overlap.gathered_product_of_codes(rows, codes, x.dtype, bias=bias, fast=True)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        call, quantizer, overlap = ctx.values
        flat = grad.flatten(0, -2)
        params = call.params(ctx.needs_input_grad)
        rows = quantizer.rows(GRADIENT, flat, turns=len(saved) > 1)
        item = _weight_grad(params, flat, rows, saved, call)

        def grad_x() -> Tensor:
            codes = quantizer.weight(weight, transposed=True)
            multiply = overlap.scattered_product_of_codes if scatters else product
            y = multiply(rows, codes, grad.dtype)
            return y.view(-1, *grad.shape[1:-1], y.shape[-1])

        needs_grad_x = ctx.needs_input_grad[0]
        scatters = needs_grad_x and overlap.scatters_gradients
        if scatters:
            return *scattering_backward(item, grad_x), None, None
        return *linear_backward(item, grad_x if needs_grad_x else None, call), None, None


class _RowProduct(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_Values],
        x: Tensor,
        weight: Tensor,
        quantizer: LinearQuantizer,
        overlap: Overlap,
    ) -> Tensor:
        flat = x.flatten(0, -2)
        saves_codes = quantizer.recipe.wgrad and ctx.needs_input_grad[1]
        rows = quantizer.rows(INPUT, flat, turns=saves_codes)
        kept = turned_codes(rows)
        ctx.save_for_backward(weight, *((kept.codes, kept.scale) if saves_codes else (flat,)))
        ctx.values = _Values(LinearCall(weight, None, True, None, False), quantizer, overlap)
        codes = quantizer.weight(weight)
        if overlap.scatters:
            y = overlap.scattered_product_of_codes(rows, codes, x.dtype, fast=True)
        else:
            y = reduce_scatter_first_dim(product(rows, codes, x.dtype, fast=True), overlap.group)
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(
        ctx: Context[_Values], grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *saved = ctx.saved_tensors
        call, quantizer, overlap = ctx.values
        flat = grad.flatten(0, -2)
        codes = quantizer.weight(weight, transposed=True)
        if len(saved) > 1 and overlap.gathers and _has_scale_of_group(quantizer, overlap):
            rows = quantizer.rows(GRADIENT, flat, is_gathered=True)
            rows, y = overlap.gathered_product_of_codes(rows, codes, grad.dtype)
        else:
            flat = all_gather_first_dim(flat, overlap.group)
            rows = quantizer.rows(GRADIENT, flat, turns=len(saved) > 1)
            y = product(rows, codes, grad.dtype)
        params = call.weight if ctx.needs_input_grad[1] else None, None
        item = _weight_grad(params, flat, rows, saved, call)
        grad_x = y.view(-1, *grad.shape[1:-1], y.shape[-1])
        return grad_x, None if is_deferred(item) else item.compute()[0], None, None


def _weight_grad(
    params: tuple[Tensor | None, Tensor | None],
    grad: Tensor,
    rows: Scaled,
    saved: list[Tensor],
    call: LinearCall,
) -> WeightGrad:
    """Return the gradients of weight and bias, to compute.

    ``rows`` are the codes of ``grad``; ``saved`` is x [t, i], or its codes and their scale.
    """
    x, *scales = saved
    if not scales:
        return WeightGrad(*params, grad, x, group=call.gather_group, is_own=True)
    scaled = Scaled(x, scales[0])
    return ScaledWeightGrad(*params, grad, turned_codes(rows), scaled, group=call.gather_group)


def _has_scale_of_group(quantizer: LinearQuantizer, overlap: Overlap) -> bool:
    """Return whether the scale of gathered gradients is that of their values on all ranks.

    Current scaling takes the amax of the gathered values; ``amax_group`` has more ranks than the
    tensor-parallel group under context parallelism.
    """
    return quantizer.recipe.history > 0 or quantizer.amax_group.size() == overlap.group.size()
