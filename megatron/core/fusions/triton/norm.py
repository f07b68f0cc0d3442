"""LayerNorm and RMSNorm; backward reads its input and gradient once for all results.

Forward is one read and one write, as torch's own.  Backward moves three times the tensor; torch
reads input and gradient again for the weight: five times.  The gradient of the weight is summed in
two stages in a fixed order: each of a fixed number of programs sums its rows, then these sums are
added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.autograd import Context, Function

_PROGRAMS = 528  # in backward: four for each of the 132 processors of an H100
_ROWS = 16  # of each, at least: then the first sums weigh little


class _Norm(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[dict[str, int]], x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        width = x.shape[-1]
        rows, out = x.numel() // width, torch.empty_like(x)
        mean, scale = x.new_empty(2, rows, dtype=torch.float32)
        ctx.values = how = {"CENTERS": bias is not None, **_shape(width)}
        ctx.save_for_backward(x, weight, mean, scale)
        if rows:
            tensors = x, weight, bias, out, mean, scale
            _forward[(rows,)](*tensors, width, eps, **how)
        return out

    @staticmethod
    def backward(ctx: Context[dict[str, int]], grad: Tensor) -> tuple[Tensor | None, ...]:
        how = ctx.values
        x, weight, mean, scale = ctx.saved_tensors
        width, rows = x.shape[-1], len(scale)
        out, programs = torch.empty_like(x), max(1, min(rows // _ROWS, _PROGRAMS))
        sums = x.new_empty(2 if how["CENTERS"] else 1, programs, width, dtype=torch.float32)
        tensors = x, weight, grad.contiguous(), mean, scale, out, sums
        _backward[(programs,)](*tensors, rows, triton.cdiv(rows, programs), width, **how)
        of_weight, *of_bias = sums.sum(1).to(weight.dtype)
        return out, of_weight, of_bias[0] if of_bias else None, None


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise [..., h], contiguous, with weight [h]; LayerNorm with a bias, else RMSNorm."""
    return _Norm.apply(x, weight, bias, eps)


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@triton.jit
def _forward(
    X,
    Weight,
    Bias,
    Out,
    Mean,
    Scale,
    width,
    eps,
    CENTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < width
    x = tl.load(X + row * width + place, mask=inside, other=0.0).to(tl.float32)
    if CENTERS:
        mean = tl.sum(x, 0) / width
        tl.store(Mean + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    scale = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / width + eps)
    tl.store(Scale + row, scale)
    out = x * scale * tl.load(Weight + place, mask=inside, other=0.0).to(tl.float32)
    if CENTERS:
        out += tl.load(Bias + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(Out + row * width + place, out.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    X,
    Weight,
    Grad,
    Mean,
    Scale,
    Out,
    Sums,
    rows,
    each,
    width,
    CENTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < width
    weight = tl.load(Weight + place, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for r in range(program * each, tl.minimum(program * each + each, rows)):
        row = tl.cast(r, tl.int64)
        scale = tl.load(Scale + row)
        x = tl.load(X + row * width + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(Grad + row * width + place, mask=inside, other=0.0).to(tl.float32)
        if CENTERS:
            x = tl.where(inside, x - tl.load(Mean + row), 0.0)
        x *= scale
        of_weight += grad * x
        of_bias += grad
        grad *= weight
        out = grad - x * (tl.sum(grad * x, 0) / width)
        if CENTERS:
            out -= tl.sum(grad, 0) / width
        out *= scale
        tl.store(Out + row * width + place, out.to(Out.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * width + place
    tl.store(Sums + at, of_weight, mask=inside)
    if CENTERS:
        to = Sums + tl.num_programs(0).to(tl.int64) * width
        tl.store(to + at, of_bias, mask=inside)
