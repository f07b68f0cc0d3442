"""residual + dropout(x + bias): one read of both and one write; backward one read and one write.

Plain torch moves three more times the bytes of x for a bias and 2.5 times for dropout, and saves a
mask of one byte per value.  A mask is a function of a seed and of the position of a value here:
nothing is saved.  The seed has 8 bytes and torch's generator draws it on the device.  So ranks that
hold the same tensor drop the same values under any active random stream, and recomputation repeats
the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions.triton.launch import launch

_BLOCK, _WARPS = 1024, 4
_SEEDS = 2**62


class _Values(NamedTuple):
    prob: float
    width: int
    dtype: torch.dtype
    bias_dtype: torch.dtype | None


class _BiasDropoutAdd(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_Values], x: Tensor, bias: Tensor | None, residual: Tensor, prob: float
    ) -> Tensor:
        seed = draw_seed(prob, x)
        out = torch.empty_like(residual)
        width = x.shape[-1]
        _launch(_forward, x, bias, residual, out, seed, width=width, prob=prob)
        ctx.save_for_backward(seed)
        ctx.values = _Values(prob, width, x.dtype, None if bias is None else bias.dtype)
        return out

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        prob, width, dtype, bias_dtype = ctx.values
        of_x, of_bias = grad.to(dtype), None
        if prob:
            grad = grad.contiguous()
            of_x = torch.empty_like(grad, dtype=dtype)
            _launch(_backward, grad, of_x, seed, width=width, prob=prob)
        if ctx.needs_input_grad[1]:
            of_bias = of_x.flatten(0, -2).sum(0).to(bias_dtype)
        return of_x, of_bias, grad, None


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
    """Compute [..., h], [h], [..., h] -> [..., h] in the dtype of ``residual``; all contiguous."""
    return _BiasDropoutAdd.call(x, bias, residual, prob)


def draw_seed(prob: float, like: Tensor) -> Tensor | None:
    """Draw the seed of one mask on the device of ``like``; None if nothing is dropped."""
    return torch.randint(_SEEDS, (1,), device=like.device) if prob else None


@triton.jit
def stays(Seed, first, prob, BLOCK: tl.constexpr):
    """Return the mask of BLOCK values: four per Philox draw, the first draw is number ``first``."""
    # Counters of 32 bits: four values each serve 2^34 values.
    counter = first + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.rand4x(tl.load(Seed), counter)
    draws = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(draws, (BLOCK,)) >= prob


def _launch(
    kernel: triton.JITFunction, first: Tensor, *tensors: Tensor | None, width: int, prob: float
) -> None:
    count = first.numel()
    if count:
        numbers = count, width, prob, 1 / (1 - prob), prob > 0, _BLOCK
        launch(kernel, (-(-count // _BLOCK),), (first, *tensors), numbers, _WARPS)


@triton.jit
def _forward(
    X,
    Bias,
    Residual,
    Out,
    Seed,
    count,
    width,
    prob,
    factor,
    DROPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    if Bias is not None:
        x += tl.load(Bias + place % width, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        x = tl.where(stays(Seed, program * (BLOCK // 4), prob, BLOCK), x * factor, 0.0)
    x += tl.load(Residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + place, x.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    Grad, Out, Seed, count, width, prob, factor, DROPS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(Grad + place, mask=place < count, other=0.0).to(tl.float32)
    if DROPS:
        grad = tl.where(stays(Seed, program * (BLOCK // 4), prob, BLOCK), grad * factor, 0.0)
    tl.store(Out + place, grad.to(Out.dtype.element_ty), mask=place < count)
