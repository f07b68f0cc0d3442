"""LayerNorm and RMSNorm of a sum with the residual stream; backward reads each tensor once.

`norm_of_sum` returns residual + dropout(x + bias) and its norm: two reads and two writes, where an
addition and a norm move five tensors.  Its backward moves four: it adds the gradient of the sum,
which autograd would add in a pass over three tensors, and sums the gradient of the bias.

A dropout mask is a function of a seed and of the position of a value: nothing is saved.  The seed
has 8 bytes and torch's generator draws it on the device.  So ranks that hold the same tensor drop
the same values under any active random stream, and recomputation repeats the mask.

Gradients of weights and biases are summed in two stages in a fixed order: each of a fixed number of
programs sums its rows, then these sums are added.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions.triton.launch import launch, power_of_2

_PROGRAMS = 528  # in backward: four for each of the 132 processors of an H100
_ROWS = 16  # of each, at least: then the first sums weigh little
_SEEDS = 2**62


class _Values(NamedTuple):
    """What backward knows of the inputs beside saved tensors."""

    has_shift: bool  # a LayerNorm
    has_bias: bool
    prob: float
    dtype: torch.dtype  # of x
    parameter_dtype: torch.dtype  # of weight, shift and bias


class _NormOfSum(Function[tuple[Tensor, Tensor | None]]):
    @staticmethod
    def forward(
        ctx: Context[_Values],
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor | None,
        shift: Tensor | None,
        prob: float,
        eps: float,
    ) -> tuple[Tensor, Tensor | None]:
        width = x.shape[-1]
        rows = x.numel() // width
        dtype = x.dtype if bias is None else bias.dtype
        total = torch.empty_like(residual)
        out = None
        if weight is not None:
            dtype = weight.dtype
            out = torch.empty_like(residual, dtype=dtype)
        # 1 / rms; of a LayerNorm 1 / deviation and mean
        stats = x.new_empty(1 if shift is None else 2, rows, dtype=torch.float32)
        seed = torch.randint(_SEEDS, (1,), device=x.device) if prob else None
        if rows:
            tensors = total, weight, shift, out, stats, x, bias, residual, seed
            block, warps = _sizes(width)
            launch(_forward, (rows,), tensors, (width, eps, prob, 1 / (1 - prob), block), warps)
        ctx.values = _Values(shift is not None, bias is not None, prob, x.dtype, dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(None if weight is None else total, weight, stats, seed)
        return total, out

    @staticmethod
    def backward(
        ctx: Context[_Values], of_total: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        total, weight, stats, seed = ctx.saved_tensors
        has_shift, has_bias, prob, dtype, parameter_dtype = ctx.values
        of_total = None if of_total is None else of_total.contiguous()
        of_residual = torch.empty_like(total if of_total is None else of_total)
        is_apart = seed is not None or dtype != of_residual.dtype
        of_x = torch.empty_like(of_residual, dtype=dtype) if is_apart else None
        width = of_residual.shape[-1]
        count = stats.shape[1]
        programs = max(1, min(count // _ROWS, _PROGRAMS))
        num_norm = 0 if grad is None else 1 + has_shift
        sums = stats.new_empty(num_norm + has_bias, programs, width)
        grad = None if grad is None else grad.contiguous()
        tensors = of_residual, total, weight, stats, grad, of_x, of_total, seed, sums
        block, warps = _sizes(width)
        numbers = (
            *(count, -(-count // programs), width, prob, 1 / (1 - prob)),
            *(has_shift, has_bias, block),
        )
        launch(_backward, (programs,), tensors, numbers, warps)
        totals = sums.sum(1).to(parameter_dtype).unbind()
        return (
            of_residual if of_x is None else of_x,
            totals[-1] if has_bias else None,
            of_residual,
            totals[0] if num_norm else None,
            totals[1] if num_norm == 2 else None,
            None,
            None,
        )


def norm_of_sum(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    prob: float,
    parameters: tuple[Tensor | None, Tensor | None],
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Return residual + dropout(x + bias) in the dtype of ``residual``, and its norm.

    ``parameters``: weight and bias of the norm, whose dtype the norm has; a LayerNorm with a bias,
    else an RMSNorm, and without a weight only the sum.  All are contiguous.
    """
    return _NormOfSum.call(x, bias, residual, *parameters, prob, eps)


@cache
def _sizes(width: int) -> tuple[int, int]:
    """Return the number of values of a block, and its number of warps."""
    block = power_of_2(width)
    return block, min(max(block // 512, 1), 16)


@triton.jit
def _kept(Seed, row, width, prob, BLOCK: tl.constexpr):
    """Return the dropout mask of a row: four values per Philox draw, rows at multiples of four."""
    # Counters of 32 bits: four values each serve 2^34 values.
    counter = (row * tl.cdiv(width, 4)).to(tl.int32) + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.rand4x(tl.load(Seed), counter)
    draws = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(draws, (BLOCK,)) >= prob


@triton.jit
def _forward(
    X,
    Weight,
    Shift,
    Out,
    Stats,
    Added,
    Bias,
    Residual,
    Seed,
    width,
    eps,
    prob,
    factor,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    at = row * width + place
    x = tl.load(Added + at, mask=inside, other=0.0).to(tl.float32)
    if Bias is not None:
        x += tl.load(Bias + place, mask=inside, other=0.0).to(tl.float32)
    if Seed is not None:
        x = tl.where(_kept(Seed, row, width, prob, BLOCK), x * factor, 0.0)
    x += tl.load(Residual + at, mask=inside, other=0.0).to(tl.float32)
    # Backward reads the rounded sum, so the norm is of the rounded sum too.
    rounded = x.to(X.dtype.element_ty)
    tl.store(X + at, rounded, mask=inside)
    if Weight is not None:
        x = rounded.to(tl.float32)
        if Shift is not None:
            mean = tl.sum(x, 0) / width
            tl.store(Stats + tl.num_programs(0) + row, mean)
            x = tl.where(inside, x - mean, 0.0)
        scale = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
        tl.store(Stats + row, scale)
        out = x * scale * tl.load(Weight + place, mask=inside, other=0.0).to(tl.float32)
        if Shift is not None:
            out += tl.load(Shift + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(Out + at, out.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    Out,
    X,
    Weight,
    Stats,
    Grad,
    OfAdded,
    OfSum,
    Seed,
    Sums,
    rows,
    each,
    width,
    prob,
    factor,
    CENTERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < width
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_shift = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    if Grad is not None:
        weight = tl.load(Weight + place, mask=inside, other=0.0).to(tl.float32)
    for r in range(program * each, tl.minimum(program * each + each, rows)):
        row = tl.cast(r, tl.int64)
        at = row * width + place
        if Grad is None:
            out = tl.zeros((BLOCK,), tl.float32)
        else:
            scale = tl.load(Stats + row)
            x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(Grad + at, mask=inside, other=0.0).to(tl.float32)
            if CENTERS:
                x = tl.where(inside, x - tl.load(Stats + rows + row), 0.0)
            x *= scale
            of_weight += grad * x
            of_shift += grad
            grad *= weight
            out = grad - x * (tl.sum(grad * x, 0) / width)
            if CENTERS:
                out -= tl.sum(grad, 0) / width
            out *= scale
        if OfSum is not None:
            out += tl.load(OfSum + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(Out + at, out.to(Out.dtype.element_ty), mask=inside)
        if Seed is not None:
            out = tl.where(_kept(Seed, row, width, prob, BLOCK), out * factor, 0.0)
        if OfAdded is not None:
            tl.store(OfAdded + at, out.to(OfAdded.dtype.element_ty), mask=inside)
        of_bias += out
    at = program.to(tl.int64) * width + place
    stride = tl.num_programs(0).to(tl.int64) * width
    if Grad is not None:
        tl.store(Sums + at, of_weight, mask=inside)
        at += stride
        if CENTERS:
            tl.store(Sums + at, of_shift, mask=inside)
            at += stride
    if HAS_BIAS:
        tl.store(Sums + at, of_bias, mask=inside)
