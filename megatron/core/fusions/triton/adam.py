"""AdamW in one pass for parameters and states that are not all float32.

Plain torch converts each tensor separately: some 40 bytes per parameter more for bf16 with a 16-bit
remainder, and twice that for 16- or 8-bit moments.  The storage formats are those of
`optimizer.reduced_precision_state`: float32; bf16; fp16 and e4m3 with an exponent per 128 values;
the square root of second moments; the upper and lower half of float32.  The random rounding is
bitwise identical to the plain form's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.adam_step import Moment, Step

_ROWS, _WARPS = 8, 4  # 128 numbers a row, 8 a thread
_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
_AS_BITS = {1: torch.int8, 2: torch.int16, 4: torch.float32}

MOMENTS = tuple(_KIND)
WRITES_WEIGHTS = False  # a float32 update is torch's own, and so is the copy


def update(
    param: Tensor, lower: Tensor | None, grad: Tensor, mean: Moment, square: Moment, step: Step
) -> None:
    """Update ``param``: float32, or bf16 with the ``lower`` 16 bits; all are contiguous."""
    beta1, beta2 = step.betas
    means, mean_exponents, mean_is_root = mean
    squares, square_exponents, square_is_root = square
    _update[(triton.cdiv(param.numel(), 128 * _ROWS),)](
        param if lower is None else param.view(torch.int16),
        lower,
        grad,
        _bits(means),
        mean_exponents,
        _bits(squares),
        square_exponents,
        step.number,
        step.corrections,
        param.numel(),
        step.lr,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        step.eps,
        step.lr * step.weight_decay,
        step.divisor,
        IS_SPLIT=lower is not None,
        MEAN=_KIND[means.dtype],
        MEAN_IS_ROOT=mean_is_root,
        SQUARE=_KIND[squares.dtype],
        SQUARE_IS_ROOT=square_is_root,
        ROWS=_ROWS,
        num_warps=_WARPS,
    )
    torch.autograd.graph.increment_version(param)


def _bits(values: Tensor) -> Tensor:
    return values.view(_AS_BITS[values.dtype.itemsize])


@triton.jit
def _power_of_2(exponents):
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _wide(codes, KIND: tl.constexpr):
    """Convert bits to float32: format 1 is bf16, 2 fp16, 3 e4m3."""
    if KIND == 1:
        values = (codes.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 2:
        values = codes.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        size = codes.to(tl.int32) & 0x7F
        values = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        values = tl.where(size < 8, size.to(tl.float32) * 0.001953125, values)  # below 2^-6
        values = tl.where(size == 0x7F, float("nan"), values)
        values = tl.where(codes < 0, -values, values)
    return values


@triton.jit
def _narrow(values, KIND: tl.constexpr):
    """Convert float32 to bits; exact, except for fp16 and e4m3 below their normal range."""
    bits = values.to(tl.int32, bitcast=True)
    if KIND == 1:
        codes = (bits >> 16).to(tl.int16)
    elif KIND == 2:
        codes = values.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        size = bits & 0x7FFFFFFF
        normal = (size >> 20) - (120 << 3)
        # The last bit of 2^14 is 2^-9: adding it rounds to nearest, ties to even.
        shifted = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True)
        small = shifted - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal)
        code = tl.where(size > 0x7F800000, 0x7F, code)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.int8)
    return codes


@triton.jit
def _read(Codes, Exponents, at, inside, block, KIND: tl.constexpr, IS_ROOT: tl.constexpr):
    """Load values in float32 and as they are stored."""
    codes = tl.load(Codes + at, mask=inside, other=0)
    if KIND == 0:
        values = codes
    else:
        values = _wide(codes, KIND)
        if KIND > 1:
            exponents = tl.load(Exponents + block, mask=block >= 0, other=0).to(tl.int32)
            values *= _power_of_2(exponents)[:, None]
        if IS_ROOT:
            values *= values
    return values, codes


@triton.jit
def _write(
    Codes,
    Exponents,
    at,
    inside,
    block,
    values,
    before,
    chance,
    KIND: tl.constexpr,
    IS_ROOT: tl.constexpr,
):
    """Store ``values``, rounded up or down by ``chance`` and the bits stored ``before``."""
    if KIND == 0:
        tl.store(Codes + at, values, mask=inside)
    else:
        KEPT: tl.constexpr = 16 if KIND == 1 else (19 if KIND == 2 else 12)  # bits
        above_zero = values > 0
        if IS_ROOT:
            values = tl.sqrt_rn(values)
        if KIND > 1:
            TOP: tl.constexpr = 14 if KIND == 2 else 7
            LIMIT: tl.constexpr = 32752.0 if KIND == 2 else 240.0  # the largest below 2^(TOP + 1)
            largest = tl.max(tl.where(inside, tl.abs(values), 0.0), 1)
            exponents = (largest.to(tl.int32, bitcast=True) >> 23) - 127 - TOP
            exponents = tl.minimum(tl.maximum(exponents, -126), 126 - TOP)
            tl.store(Exponents + block, exponents.to(tl.int8), mask=block >= 0)
            values *= _power_of_2(-exponents)[:, None]
            values = tl.where(values > LIMIT, LIMIT, tl.where(values < -LIMIT, -LIMIT, values))
        noise = ((before.to(tl.int32) * 0x9E3779B) ^ chance) * 0x27D4EB2F
        noise = (noise >> KEPT) & ((1 << (32 - KEPT)) - 1)
        bits = (values.to(tl.int32, bitcast=True) + noise) & (-(1 << (32 - KEPT)))
        values = bits.to(tl.float32, bitcast=True)
        if IS_ROOT:
            SMALLEST: tl.constexpr = 5.9604644775390625e-08 if KIND == 2 else 0.001953125
            values = tl.where(above_zero & (values < SMALLEST), SMALLEST, values)
        tl.store(Codes + at, _narrow(values, KIND), mask=inside)


@triton.jit
def _update(
    Param,
    Lower,
    Grad,
    Mean,
    MeanExponents,
    Square,
    SquareExponents,
    Number,
    Corrections,
    count,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    divisor,
    IS_SPLIT: tl.constexpr,
    MEAN: tl.constexpr,
    MEAN_IS_ROOT: tl.constexpr,
    SQUARE: tl.constexpr,
    SQUARE_IS_ROOT: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = at < count
    block = tl.where(block * 128 < count, block, -1)

    if IS_SPLIT:
        bits = tl.load(Param + at, mask=inside, other=0).to(tl.int32) << 16
        bits += tl.load(Lower + at, mask=inside, other=0).to(tl.int32)
        param = bits.to(tl.float32, bitcast=True)
    else:
        param = tl.load(Param + at, mask=inside, other=0.0)
        bits = param.to(tl.int32, bitcast=True)
    chance = ((bits >> 16) + tl.load(Number).to(tl.int32) * 0x2545F491) * 0x165667B1

    grad = tl.load(Grad + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.div_rn(grad, grad * 0 + divisor)
    mean, old_mean = _read(Mean, MeanExponents, at, inside, block, MEAN, MEAN_IS_ROOT)
    square, old_square = _read(Square, SquareExponents, at, inside, block, SQUARE, SQUARE_IS_ROOT)
    mean = beta1 * mean + rest1 * grad
    square = beta2 * square + rest2 * grad * grad
    length = tl.sqrt_rn(square) / tl.sqrt_rn(tl.load(Corrections + 1)) + eps
    param -= decay * param
    param -= lr / tl.load(Corrections) * (mean / length)

    _write(Mean, MeanExponents, at, inside, block, mean, old_mean, chance, MEAN, MEAN_IS_ROOT)
    _write(
        Square,
        SquareExponents,
        at,
        inside,
        block,
        square,
        old_square,
        chance,
        SQUARE,
        SQUARE_IS_ROOT,
    )
    if IS_SPLIT:
        bits = param.to(tl.int32, bitcast=True)
        tl.store(Param + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(Lower + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(Param + at, param, mask=inside)
