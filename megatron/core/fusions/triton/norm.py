"""LayerNorm and RMSNorm, also of a sum with the residual stream; backward reads each tensor once.

Forward of `norm` is one read and one write, as torch's own.  Backward moves three times the tensor;
torch reads input and gradient again for the weight: five times.

`norm_of_sum` returns residual + dropout(x + bias) and its norm: two reads and two writes, where an
addition and a norm move five tensors.  Its backward moves four: it adds the gradient of the sum,
which autograd would add in a pass over three tensors, and sums the gradient of the bias.

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
from megatron.core.fusions.triton.bias_dropout_add import draw_seed, stays
from megatron.core.fusions.triton.launch import launch, power_of_2

_PROGRAMS = 528  # in backward: four for each of the 132 processors of an H100
_ROWS = 16  # of each, at least: then the first sums weigh little


class _Rows(NamedTuple):
    """What backward needs of the forward pass: the normalized rows and their statistics."""

    x: Tensor
    weight: Tensor
    stats: Tensor  # float32 [1, rows]: 1 / rms; LayerNorm [2, rows]: 1 / deviation, mean


class _Sum(NamedTuple):
    """What is added before the norm; in backward, the gradient of the sum and where x's goes."""

    x: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    seed: Tensor | None = None


_NOTHING = _Sum()


class _Values(NamedTuple):
    """What backward knows of the parameters and of the x that is added."""

    has_shift: bool  # a LayerNorm
    bias_dtype: torch.dtype | None = None  # None: no bias is added
    prob: float = 0.0
    dtype: torch.dtype | None = None  # of the x that is added


class _Norm(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_Values], x: Tensor, weight: Tensor, shift: Tensor | None, eps: float
    ) -> Tensor:
        out = torch.empty_like(x)
        ctx.values = _Values(shift is not None)
        ctx.save_for_backward(*_run_forward(x, weight, shift, out, eps))
        return out

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = _Rows(*ctx.saved_tensors)
        out = torch.empty_like(rows.x)
        of_weight, of_shift, _ = _run_backward(rows, grad, out, _NOTHING, ctx.values)
        return out, of_weight, of_shift, None


class _NormOfSum(Function[tuple[Tensor, Tensor]]):
    @staticmethod
    def forward(
        ctx: Context[_Values],
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        shift: Tensor | None,
        prob: float,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(residual)
        out = torch.empty_like(residual, dtype=dtype)
        seed = draw_seed(prob, x)
        bias_dtype = None if bias is None else bias.dtype
        ctx.values = _Values(shift is not None, bias_dtype, prob, x.dtype)
        ctx.set_materialize_grads(False)
        added = _Sum(x, bias, residual, seed)
        rows = _run_forward(total, weight, shift, out, eps, added, prob)
        ctx.save_for_backward(*rows, seed)
        return total, out

    @staticmethod
    def backward(
        ctx: Context[_Values], of_total: Tensor | None, grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *saved, seed = ctx.saved_tensors
        rows, values = _Rows(*saved), ctx.values
        of_residual = torch.empty_like(rows.x)
        is_apart = seed is not None or values.dtype != rows.x.dtype
        of_x = torch.empty_like(rows.x, dtype=values.dtype) if is_apart else None
        ends = _Sum(of_x, None, None if of_total is None else of_total.contiguous(), seed)
        if grad is None:
            grad = torch.zeros_like(rows.x)
        of_weight, of_shift, of_bias = _run_backward(rows, grad, of_residual, ends, values)
        of_x = of_residual if of_x is None else of_x
        return of_x, of_bias, of_residual, of_weight, of_shift, None, None, None


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize [..., h], contiguous, with weight [h]; LayerNorm with a bias, else RMSNorm."""
    return _Norm.call(x, weight, bias, eps)


def norm_of_sum(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    prob: float,
    parameters: tuple[Tensor, Tensor | None],
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return residual + dropout(x + bias) in the dtype of ``residual``, and its norm.

    ``parameters``: weight and bias of the norm, whose dtype the norm has.  All are contiguous.
    """
    weight, shift = parameters
    return _NormOfSum.call(x, bias, residual, weight, shift, prob, eps, weight.dtype)


def _run_forward(
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    out: Tensor,
    eps: float,
    added: _Sum = _NOTHING,
    prob: float = 0.0,
) -> _Rows:
    """Write the norm of ``x`` to ``out``; with ``added``, write the sum to ``x`` first."""
    width = x.shape[-1]
    rows = x.numel() // width
    stats = x.new_empty(1 if shift is None else 2, rows, dtype=torch.float32)
    if rows:
        tensors = x, weight, shift, out, stats, *added
        block, warps = _sizes(width)
        launch(_forward, (rows,), tensors, (width, eps, prob, 1 / (1 - prob), block), warps)
    return _Rows(x, weight, stats)


def _run_backward(
    rows: _Rows, grad: Tensor, out: Tensor, ends: _Sum, values: _Values
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Write the gradient of the rows to ``out``; return those of weight, shift and added bias."""
    width = rows.x.shape[-1]
    count = rows.stats.shape[1]
    programs = max(1, min(count // _ROWS, _PROGRAMS))
    dtype = rows.weight.dtype
    bias_dtype = values.bias_dtype
    has_shift = values.has_shift
    parts = 1 + has_shift + (bias_dtype is not None)
    sums = rows.x.new_empty(parts, programs, width, dtype=torch.float32)
    tensors = *rows, grad.contiguous(), out, ends.x, ends.residual, ends.seed, sums
    block, warps = _sizes(width)
    numbers = (
        *(count, -(-count // programs), width, values.prob, 1 / (1 - values.prob)),
        *(has_shift, bias_dtype is not None, block),
    )
    launch(_backward, (programs,), tensors, numbers, warps)
    totals = sums.sum(1)
    if bias_dtype is None or bias_dtype == dtype:
        grads = totals.to(dtype).unbind()
    else:
        *others, of_bias = totals.unbind()
        grads = (*(of.to(dtype) for of in others), of_bias.to(bias_dtype))
    return (
        grads[0],
        grads[1] if has_shift else None,
        grads[-1] if bias_dtype is not None else None,
    )


@cache
def _sizes(width: int) -> tuple[int, int]:
    """Return the number of values of a block, and its number of warps."""
    block = power_of_2(width)
    return block, min(max(block // 512, 1), 16)


@triton.jit
def _kept(Seed, row, width, prob, BLOCK: tl.constexpr):
    """Return the dropout mask of a row, with rows at multiples of four values."""
    return stays(Seed, (row * tl.cdiv(width, 4)).to(tl.int32), prob, BLOCK)


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
    if Added is None:
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(Added + at, mask=inside, other=0.0).to(tl.float32)
        if Bias is not None:
            x += tl.load(Bias + place, mask=inside, other=0.0).to(tl.float32)
        if Seed is not None:
            x = tl.where(_kept(Seed, row, width, prob, BLOCK), x * factor, 0.0)
        x += tl.load(Residual + at, mask=inside, other=0.0).to(tl.float32)
        # Backward reads the rounded sum, so the norm is of the rounded sum too.
        rounded = x.to(X.dtype.element_ty)
        tl.store(X + at, rounded, mask=inside)
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
    X,
    Weight,
    Stats,
    Grad,
    Out,
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
    weight = tl.load(Weight + place, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_shift = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for r in range(program * each, tl.minimum(program * each + each, rows)):
        row = tl.cast(r, tl.int64)
        at = row * width + place
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
    tl.store(Sums + at, of_weight, mask=inside)
    if CENTERS:
        tl.store(Sums + stride + at, of_shift, mask=inside)
    if HAS_BIAS:
        tl.store(Sums + (2 * stride if CENTERS else stride) + at, of_bias, mask=inside)
