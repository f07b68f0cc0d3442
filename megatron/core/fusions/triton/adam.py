"""AdamW in one pass for parameters and states that are not all float32.

Plain torch converts each tensor separately: some 40 bytes per parameter more for bf16 with a 16-bit
remainder, and twice that for 16- or 8-bit moments.  The storage formats are those of
`optimizer.reduced_precision_state`: float32; bf16; fp16 and e4m3 with an exponent per 128 values;
the square root of second moments; the upper and lower half of float32.  The random rounding is
bitwise identical to the plain form's.

One launch updates all parameters of the same formats.  It reads the addresses of their tensors from
a table on the device, which is copied there only if an address has changed: gradient buffers,
weights and state stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core import device
from megatron.core.fusions.adam_step import Step, Updated

_ROWS, _WARPS = 8, 4  # rows of 128 values at a time, 8 values a thread
_CHUNK = 128  # rows of a program
_TENSORS = 8  # of a parameter, in the order of `_addresses`
_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}

MOMENTS = tuple(_KIND)
WEIGHTS = (torch.bfloat16, torch.float16)


def update(updated: Sequence[Updated], step: Step) -> None:
    """Update parameters: one launch for those whose tensors have the same formats.

    Tensors that begin or end within 16 bytes have a launch of their own, with narrow loads.
    """
    alike: dict[tuple[Any, ...], list[Updated]] = {}
    for each in updated:
        if each.param.numel():
            alike.setdefault(_formats(each), []).append(each)
    for formats, members in alike.items():
        _launch(members, step, formats)
    changed = [t for each in updated for t in (each.param, each.weight) if t is not None]
    torch.autograd.graph.increment_version(changed)


def _launch(updated: Sequence[Updated], step: Step, formats: tuple[Any, ...]) -> None:
    is_aligned, is_split, grad, mean, mean_is_root, square, square_is_root, weight = formats
    where = updated[0].param.device
    sizes = tuple(each.param.numel() for each in updated)
    addresses = tuple(address for each in updated for address in _addresses(each))
    chunks = _chunks(sizes, where)
    beta1, beta2 = step.betas
    _update[(len(chunks),)](
        _table((*addresses, *sizes), where),
        chunks,
        len(updated),
        step.number,
        step.corrections,
        step.divisor,
        step.accepted,
        step.lr,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        step.eps,
        step.lr * step.weight_decay,
        IS_ALIGNED=is_aligned,
        IS_SPLIT=is_split,
        GRAD=grad,
        MEAN=mean,
        MEAN_IS_ROOT=mean_is_root,
        SQUARE=square,
        SQUARE_IS_ROOT=square_is_root,
        WEIGHT=weight,
        TENSORS=_TENSORS,
        ROWS=_ROWS,
        CHUNK=_CHUNK,
        num_warps=_WARPS,
    )


def _formats(updated: Updated) -> tuple[Any, ...]:
    _, lower, grad, (means, _, mean_is_root), (squares, _, square_is_root), weight = updated
    moments = _KIND[means.dtype], mean_is_root, _KIND[squares.dtype], square_is_root
    kind_of_weight = 0 if weight is None else _KIND[weight.dtype]
    is_aligned = all(n % 16 == 0 for n in (updated.param.numel(), *_addresses(updated)))
    return is_aligned, lower is not None, _KIND[grad.dtype], *moments, kind_of_weight


def _addresses(updated: Updated) -> Iterator[int]:
    param, lower, grad, (means, mean_exponents, _), (squares, square_exponents, _), weight = updated
    for tensor in (param, lower, grad, means, mean_exponents, squares, square_exponents, weight):
        yield 0 if tensor is None else tensor.data_ptr()


@lru_cache(maxsize=256)
def _table(values: tuple[int, ...], where: torch.device) -> Tensor:
    """Return addresses [parameters * tensors] and sizes [parameters] on the device."""
    return _to_device(torch.tensor(values), where)


@lru_cache(maxsize=256)
def _chunks(sizes: tuple[int, ...], where: torch.device) -> Tensor:
    """Return [programs, 2]: the parameter of each program, and its chunk of the parameter."""
    counts = torch.tensor([triton.cdiv(size, 128 * _CHUNK) for size in sizes])
    params = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    first = (counts.cumsum(0) - counts)[params]
    pairs = torch.stack([params, torch.arange(len(params)) - first], 1)
    return _to_device(pairs.int(), where)


def _to_device(values: Tensor, where: torch.device) -> Tensor:
    # From page-locked memory, so that the host does not wait for the copy.
    return device.host_array(values, where).to(where, non_blocking=True)


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
def _round(values, KIND: tl.constexpr):
    """Convert float32 to the bits of bf16 (1) or fp16 (2), rounded to nearest, ties to even."""
    if KIND == 2:
        codes = values.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        codes = tl.where(values != values, 0x7FC0, bits).to(tl.int16)
    return codes


@triton.jit
def _pointer(Address, KIND: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Load a pointer to values of a format, 16- and 8-bit ones as integers."""
    TYPE: tl.constexpr = tl.float32 if KIND == 0 else (tl.int8 if KIND == 3 else tl.int16)
    pointer = tl.load(Address).to(tl.pointer_type(TYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)  # bytes: loads and stores are wide
    return pointer


@triton.jit
def _update(
    Table,
    Chunks,
    num_params,
    Number,
    Corrections,
    Divisor,
    Accepted,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    IS_ALIGNED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    GRAD: tl.constexpr,
    MEAN: tl.constexpr,
    MEAN_IS_ROOT: tl.constexpr,
    SQUARE: tl.constexpr,
    SQUARE_IS_ROOT: tl.constexpr,
    WEIGHT: tl.constexpr,
    TENSORS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    which = tl.load(Chunks + 2 * tl.program_id(0))
    first = tl.load(Chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    count = tl.load(Table + num_params * TENSORS + which)
    if IS_ALIGNED:
        count = tl.multiple_of(count, 16)
    Row = Table + which * TENSORS
    Param = _pointer(Row, 1 if IS_SPLIT else 0, IS_ALIGNED)
    Lower = _pointer(Row + 1, 1, IS_ALIGNED)
    Grad = _pointer(Row + 2, GRAD, IS_ALIGNED)
    Mean = _pointer(Row + 3, MEAN, IS_ALIGNED)
    MeanExponents = _pointer(Row + 4, 3, IS_ALIGNED)
    Square = _pointer(Row + 5, SQUARE, IS_ALIGNED)
    SquareExponents = _pointer(Row + 6, 3, IS_ALIGNED)
    Weight = _pointer(Row + 7, 1, IS_ALIGNED)

    chance_of_step = tl.load(Number).to(tl.int32) * 0x2545F491
    divisor = tl.load(Divisor)
    rate = lr / tl.load(Corrections)
    square_correction = tl.sqrt_rn(tl.load(Corrections + 1))
    rows = tl.minimum(tl.cdiv(count, 128) - first, CHUNK).to(tl.int32)
    if Accepted is not None:
        # The host has not read the gradient norm: a step that is not accepted changes nothing.
        rows = tl.where(tl.load(Accepted) != 0, rows, 0)
    for row in range(0, rows, ROWS):
        block = first + row + tl.arange(0, ROWS)
        at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = at < count
        block = tl.where(block * 128 < count, block, -1)
        param, bits = _read_param(Param, Lower, at, inside, IS_SPLIT)
        chance = ((bits >> 16) + chance_of_step) * 0x165667B1
        grad = tl.load(Grad + at, mask=inside, other=0)
        if GRAD != 0:
            grad = _wide(grad, GRAD)
        grad = tl.div_rn(grad, grad * 0 + divisor)
        mean, old = _read(Mean, MeanExponents, at, inside, block, MEAN, MEAN_IS_ROOT)
        mean = beta1 * mean + rest1 * grad
        _write(Mean, MeanExponents, at, inside, block, mean, old, chance, MEAN, MEAN_IS_ROOT)
        square, old = _read(Square, SquareExponents, at, inside, block, SQUARE, SQUARE_IS_ROOT)
        square = beta2 * square + rest2 * grad * grad
        Exponents = SquareExponents
        _write(Square, Exponents, at, inside, block, square, old, chance, SQUARE, SQUARE_IS_ROOT)
        param -= decay * param
        param -= rate * (mean / (tl.sqrt_rn(square) / square_correction + eps))
        _write_param(Param, Lower, Weight, at, inside, param, IS_SPLIT, WEIGHT)


@triton.jit
def _read_param(Param, Lower, at, inside, IS_SPLIT: tl.constexpr):
    """Load parameters in float32, and their bits."""
    if IS_SPLIT:
        bits = tl.load(Param + at, mask=inside, other=0).to(tl.int32) << 16
        bits += tl.load(Lower + at, mask=inside, other=0).to(tl.int32)
        param = bits.to(tl.float32, bitcast=True)
    else:
        param = tl.load(Param + at, mask=inside, other=0.0)
        bits = param.to(tl.int32, bitcast=True)
    return param, bits


@triton.jit
def _write_param(
    Param, Lower, Weight, at, inside, param, IS_SPLIT: tl.constexpr, WEIGHT: tl.constexpr
):
    """Store parameters, and rounded ones into the weight of the model."""
    if IS_SPLIT:
        bits = param.to(tl.int32, bitcast=True)
        tl.store(Param + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(Lower + at, bits.to(tl.int16), mask=inside)
    else:
        tl.store(Param + at, param, mask=inside)
    if WEIGHT:
        tl.store(Weight + at, _round(param, WEIGHT), mask=inside)
