"""act(x + bias) of m rows of f; backward also sums the gradient of the bias.

Forward is one read and one write.  Backward moves 3 m f values; torch moves four, because it reads
the gradient of x again for the bias.  That gradient is summed in two stages in a fixed order: each
of a fixed number of programs sums its rows, then these sums are added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions.triton.glu import act_and_slope
from megatron.core.fusions.triton.launch import launch

_ROWS = 4
_COLUMNS = 512
_WARPS = 4  # 16 values a thread
_PROGRAMS = 1056  # in backward: eight for each of the 132 processors of an H100
_LEAST = 64  # rows of a program in backward: then the sums weigh little


def bias_activation(x: Tensor, bias: Tensor, act: str) -> Tensor:
    """Map [..., f], contiguous, and bias [f] to [..., f]; ``act``: see `act_and_slope`."""
    return _BiasActivation.call(x, bias, act)


class _BiasActivation(Function[Tensor]):
    @staticmethod
    def forward(ctx: Context[str], x: Tensor, bias: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.values = act
        out = torch.empty_like(x)
        width = x.shape[-1]
        rows = x.numel() // width
        if rows:
            grid = -(-rows // _ROWS), -(-width // _COLUMNS)
            numbers = rows, width, act, _ROWS, _COLUMNS
            launch(_forward, grid, (x, bias, out), numbers, _WARPS)
        return out

    @staticmethod
    def backward(ctx: Context[str], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        width = x.shape[-1]
        rows = x.numel() // width
        across = -(-width // _COLUMNS)
        programs = max(1, min(rows // _LEAST, _PROGRAMS // across))
        each = -(-rows // (programs * _ROWS)) * _ROWS
        of_x = torch.empty_like(x)
        sums = x.new_empty(programs, width, dtype=torch.float32)
        tensors = x, bias, grad.contiguous(), of_x, sums
        numbers = rows, each, width, ctx.values, _ROWS, _COLUMNS
        launch(_backward, (programs, across), tensors, numbers, _WARPS)
        return of_x, sums.sum(0).to(bias.dtype), None


@triton.jit
def _forward(
    X,
    Bias,
    Out,
    rows,
    width,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    bias = tl.load(Bias + column, mask=column < width, other=0.0).to(tl.float32)
    y, _ = act_and_slope(
        tl.load(X + at, mask=inside, other=0.0).to(tl.float32) + bias[None, :], ACT
    )
    tl.store(Out + at, y.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    X,
    Bias,
    Grad,
    OfX,
    Sums,
    rows,
    each,
    width,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    bias = tl.load(Bias + column, mask=column < width, other=0.0).to(tl.float32)
    # Summed over the rows at the end: a sum in the loop would synchronize all warps each time.
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(program * each, tl.minimum(program * each + each, rows), ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(Grad + at, mask=inside, other=0.0).to(tl.float32)
        _, slope = act_and_slope(x + bias[None, :], ACT)
        grad *= slope
        tl.store(OfX + at, grad.to(OfX.dtype.element_ty), mask=inside)
        total += grad
    to = Sums + program.to(tl.int64) * width + column
    tl.store(to, tl.sum(total, 0), mask=column < width)
