"""Quantization to 8 bits in one read and one write; plain torch makes three passes or more.

Scales are powers of two, so codes and scales are bitwise identical to `low_precision`.  Magnitudes
are compared as bits, so that NaN is the largest.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8
_TILE = 128
_EXPONENTS = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}  # of the largest, 1.75 x 2^(n - 1)


def cast(x: Tensor, to: torch.dtype, amax: Tensor, margin: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [r, c], their scale (which fits ``amax``) and the true largest magnitude."""
    codes, scale = torch.empty_like(x, dtype=to), x.new_empty((), dtype=torch.float32)
    programs = triton.cdiv(x.numel(), _BLOCK)
    found = x.new_zeros(max(programs, 1), dtype=torch.int32)
    exponent = _EXPONENTS[to]
    _cast[(max(programs, 1),)](
        x,
        amax,
        codes,
        scale,
        found,
        x.numel(),
        EXPONENT=exponent,
        LARGEST=1.75 * 2.0 ** (exponent - 1),
        MARGIN=margin,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return codes, scale, found.amax().view(torch.float32)


def cast_both(
    x: Tensor, to: torch.dtype, amax: Tensor, margin: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `cast`, and the codes once more as [c, r]; ``x`` is read once."""
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=to)
    scale = x.new_empty((), dtype=torch.float32)
    turned = codes.new_empty(columns, rows)
    grid = triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE)
    found = x.new_zeros(grid, dtype=torch.int32)
    exponent = _EXPONENTS[to]
    _cast_both[grid](
        x,
        amax,
        codes,
        turned,
        scale,
        found,
        rows,
        columns,
        EXPONENT=exponent,
        LARGEST=1.75 * 2.0 ** (exponent - 1),
        MARGIN=margin,
        TILE=_TILE,
        num_warps=_WARPS,
    )
    return codes, scale, found.amax().view(torch.float32), turned


def by_block(x: Tensor, to: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return codes [r, c] and the scale of each block; block sides are powers of two."""
    (rows, columns), (high, wide) = x.shape, block
    shape = triton.cdiv(rows, high), triton.cdiv(columns, wide)
    codes, scales = torch.empty_like(x, dtype=to), x.new_empty(shape, dtype=torch.float32)
    down, across = max(1, 32 // high), max(1, _TILE // wide)
    exponent = _EXPONENTS[to]
    if codes.numel():
        # One dimension: the others of a grid end at 65535.
        _by_block[(triton.cdiv(shape[1], across) * triton.cdiv(shape[0], down),)](
            x,
            codes,
            scales,
            rows,
            columns,
            *shape,
            EXPONENT=exponent,
            LARGEST=1.75 * 2.0 ** (exponent - 1),
            DOWN=down,
            HIGH=high,
            ACROSS=across,
            WIDE=wide,
            num_warps=_WARPS,
        )
    return codes, scales


def transposed(codes: Tensor) -> Tensor:
    """Transpose [.., r, c] -> [.., c, r]; all are contiguous."""
    *outer, rows, columns = codes.shape
    out = codes.new_empty(*outer, columns, rows)
    if out.numel():
        grid = triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE), math.prod(outer)
        bits = codes.view(torch.int8), out.view(torch.int8)
        _transposed[grid](*bits, rows, columns, TILE=_TILE, num_warps=_WARPS)
    return out


@triton.jit
def _scale(amax, EXPONENT: tl.constexpr, MARGIN: tl.constexpr):
    """Return `low_precision.power_of_two` for the bits of the largest magnitude."""
    exponent = (amax >> 23) - 126 + tl.where((amax & 0x7FFFFF) > 0x600000, 1, 0)
    exponent = tl.where(amax == 0, 0, exponent) - EXPONENT + MARGIN
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


@triton.jit
def _codes(x, scale, LARGEST: tl.constexpr):
    x *= (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # 1 / scale
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def _cast(
    X,
    Amax,
    Codes,
    Scale,
    Found,
    count,
    EXPONENT: tl.constexpr,
    LARGEST: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(X + place, mask=inside, other=0.0).to(tl.float32)
    amax = tl.load(Amax).to(tl.float32).to(tl.int32, bitcast=True)
    scale = _scale(amax, EXPONENT, MARGIN)
    if program == 0:
        tl.store(Scale, scale)
    tl.store(Found + program, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    tl.store(Codes + place, _codes(x, scale, LARGEST).to(Codes.dtype.element_ty), mask=inside)


@triton.jit
def _cast_both(
    X,
    Amax,
    Codes,
    Turned,
    Scale,
    Found,
    rows,
    columns,
    EXPONENT: tl.constexpr,
    LARGEST: tl.constexpr,
    MARGIN: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    # Offsets in a tile are 32 bits: those of 64 take registers that the values need.
    down = tl.program_id(1) * TILE
    across = tl.program_id(0) * TILE
    i = tl.arange(0, TILE)
    inside = (i < rows - down)[:, None] & (i < columns - across)[None, :]
    at = i[:, None] * columns + i[None, :]
    first = down.to(tl.int64) * columns + across
    x = tl.load(X + first + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.load(Amax).to(tl.float32).to(tl.int32, bitcast=True)
    scale = _scale(amax, EXPONENT, MARGIN)
    if program == 0:
        tl.store(Scale, scale)
    tl.store(Found + program, tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0))
    codes = _codes(x, scale, LARGEST).to(Codes.dtype.element_ty)
    tl.store(Codes + first + at, codes, mask=inside)
    turned = i[:, None] * rows + i[None, :]
    first = across.to(tl.int64) * rows + down
    tl.store(Turned + first + turned, tl.trans(codes), mask=tl.trans(inside))


@triton.jit
def _by_block(
    X,
    Codes,
    Scales,
    rows,
    columns,
    blocks_down,
    blocks_across,
    EXPONENT: tl.constexpr,
    LARGEST: tl.constexpr,
    DOWN: tl.constexpr,
    HIGH: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDE: tl.constexpr,
):
    in_row = tl.cdiv(blocks_across, ACROSS)
    i = tl.program_id(0) // in_row * DOWN + tl.arange(0, DOWN)
    j = tl.program_id(0) % in_row * ACROSS + tl.arange(0, ACROSS)
    r = (i * HIGH)[:, None, None, None] + tl.arange(0, HIGH)[None, :, None, None]
    c = (j * WIDE)[None, None, :, None] + tl.arange(0, WIDE)[None, None, None, :]
    at, inside = r.to(tl.int64) * columns + c, (r < rows) & (c < columns)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 3), 1)
    scale = _scale(amax, EXPONENT, 0)
    is_block = (i < blocks_down)[:, None] & (j < blocks_across)[None, :]
    tl.store(Scales + i[:, None].to(tl.int64) * blocks_across + j[None, :], scale, mask=is_block)
    codes = _codes(x, scale[:, None, :, None], LARGEST)
    tl.store(Codes + at, codes.to(Codes.dtype.element_ty), mask=inside)


@triton.jit
def _transposed(From, To, rows, columns, TILE: tl.constexpr):
    r = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    From += matrix
    To += matrix
    tile = tl.load(From + r[:, None] * columns + c[None, :], mask=inside, other=0)
    tl.store(To + c[:, None] * rows + r[None, :], tl.trans(tile), mask=tl.trans(inside))
