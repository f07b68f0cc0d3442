"""Quantization to 8 bits in one read and one write; plain torch makes three passes or more.

Scales are powers of two, so codes and scales are bitwise identical to `low_precision`.  Magnitudes
are compared as bits, so that NaN is the largest.

The rows of all experts are quantized in one kernel, without row counts on the host: ``m`` rows
[m, c], sorted by expert; ``e`` experts; ``ends`` [e] int32 is the end of each expert's rows.  Rows
after those of the last expert belong to none.  Codes and scales are those of each expert's rows
alone: one scale per expert, or one per block, of which each expert's first one begins at its first
row.  A GEMM that sums over rows reads transposed codes [c, p].  Each expert's columns begin at a
multiple of `TILE` there and end with zeros, so that the GEMM copies 16 bytes at a time; ``p`` is
`tiles_of` times `TILE`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.launch import power_of_2

_BLOCK, _WARPS = 4096, 8
TILE = 128


# Codes and scales.  A GEMM sums over the last dimension of the codes: [m, c], or transposed [c, p].
# Scales: [e] with one per expert; [c/b, m] or [p/b, c] with one for each ``b`` values of a row;
# [c/b, p/b] with square blocks, for both.
Codes = tuple[Tensor, Tensor]


_EXPONENTS = {torch.float8_e4m3fn: 9, torch.float8_e5m2: 16}  # of the largest, 1.75 x 2^(n - 1)


def cast(x: Tensor, to: torch.dtype, amax: Tensor, margin: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [r, c], their scale (which fits ``amax``) and the true largest magnitude."""
    codes, scale = torch.empty_like(x, dtype=to), x.new_empty((), dtype=torch.float32)
    programs = triton.cdiv(x.numel(), _BLOCK)
    found = x.new_zeros(max(programs, 1), dtype=torch.int32)
    _cast[(max(programs, 1),)](
        x,
        amax,
        codes,
        scale,
        found,
        x.numel(),
        EXPONENT=_EXPONENTS[to],
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
    grid = triton.cdiv(columns, TILE), triton.cdiv(rows, TILE)
    found = x.new_zeros(grid, dtype=torch.int32)
    _cast_both[grid](
        x,
        amax,
        codes,
        turned,
        scale,
        found,
        rows,
        columns,
        EXPONENT=_EXPONENTS[to],
        MARGIN=margin,
        TILE=TILE,
        num_warps=_WARPS,
    )
    return codes, scale, found.amax().view(torch.float32), turned


def by_block(x: Tensor, to: torch.dtype, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return codes [r, c] and the scale of each block; block sides are powers of two."""
    (rows, columns), (high, wide) = x.shape, block
    shape = triton.cdiv(rows, high), triton.cdiv(columns, wide)
    codes, scales = torch.empty_like(x, dtype=to), x.new_empty(shape, dtype=torch.float32)
    down, across = max(1, 32 // high), max(1, TILE // wide)
    if codes.numel():
        # One dimension: the others of a grid end at 65535.
        _by_block[(triton.cdiv(shape[1], across) * triton.cdiv(shape[0], down),)](
            x,
            codes,
            scales,
            rows,
            columns,
            *shape,
            EXPONENT=_EXPONENTS[to],
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
        grid = triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), math.prod(outer)
        bits = codes.view(torch.int8), out.view(torch.int8)
        _transposed[grid](*bits, rows, columns, TILE=TILE, num_warps=_WARPS)
    return out


def tiles_of(num_rows: int, num_experts: int) -> int:
    """Return the most tiles of rows there can be: each expert begins with one of its own."""
    return -(-num_rows // TILE) + num_experts


def amax_of_groups(x: Tensor, ends: Tensor) -> Tensor:
    """Return the largest magnitude of each expert's rows of ``x`` [m, c]: [e] fp32."""
    amax: Tensor = torch.linalg.vector_norm(x, math.inf, 1, dtype=torch.float32)
    row = torch.arange(len(x), dtype=ends.dtype, device=x.device)
    expert = torch.searchsorted(ends, row, right=True)  # e for rows of none
    found = amax.new_zeros(len(ends) + 1)
    return found.scatter_reduce_(0, expert, amax, "amax")[:-1]


def quantize_groups(
    x: Tensor,
    to: torch.dtype,
    ends: Tensor,
    *,
    amax: Tensor | None = None,
    margin: int = 0,
    block: int = 0,
    is_square: bool = False,
    rows: bool = True,
    turned: bool = False,
) -> tuple[Codes, Codes]:
    """Return the codes of ``x`` [m, c], if ``rows``, and the transposed ones, if ``turned``.

    Codes that are not asked for are empty.  ``amax`` [e]: the magnitude that each expert's scale
    must represent; without it, each ``block`` adjacent values share a scale, or with ``is_square``
    each ``TILE`` x ``TILE``.
    """
    (m, c), experts = x.shape, len(ends)
    down = tiles_of(m, experts)
    across = triton.cdiv(c, TILE)
    length = down * TILE  # columns of transposed codes
    unused = x.new_empty(0, dtype=torch.float32)
    codes = x.new_empty((m, c) if rows else (0, c), dtype=to)
    columns = x.new_empty((c, length) if turned else (c, 0), dtype=to)
    if amax is not None:
        scale = torch.empty_like(amax)
        scale_turned = scale
    elif is_square:
        scale = unused.new_empty(across, down)
        scale_turned = scale
    else:
        scale = unused.new_empty(triton.cdiv(c, block), m) if rows else unused
        scale_turned = unused.new_empty(length // block, c) if turned else unused
    _quantize_groups[(max(1, down * across),)](
        x,
        ends,
        unused if amax is None else amax,
        codes,
        scale,
        columns,
        scale_turned,
        m,
        c,
        experts,
        down,
        EXPONENT=_EXPONENTS[to],
        MARGIN=margin,
        BLOCK=0 if amax is not None else block,
        IS_SQUARE=is_square,
        HAS_ROWS=rows,
        HAS_TURNED=turned,
        EXPERTS=padded(ends),
        TILE=TILE,
        num_warps=_WARPS,
    )
    return (codes, scale), (columns, scale_turned)


def quantize_matrices(
    matrices: Tensor, to: torch.dtype, block: int, *, is_square: bool = False, turned: bool = False
) -> Codes:
    """Quantize [e, o, i] in blocks, or the ``turned`` matrices [e, i, o], which are not contiguous.

    Return scales [e, k/block, n], or [e, k/block, n/block] with ``is_square``, for a GEMM that sums
    over the last dimension k.  Turned matrices with square blocks have the transposed codes and
    scales of the others.
    """
    experts, o, i = matrices.shape
    assert not (is_square and turned), "transpose the others"
    ends = torch.arange(o, experts * o + 1, o, dtype=torch.int32, device=matrices.device)
    plain, columns = quantize_groups(
        matrices.reshape(experts * o, i),
        to,
        ends,
        block=block,
        is_square=is_square,
        rows=not turned,
        turned=turned,
    )
    tiles = triton.cdiv(o, TILE)
    if turned:
        codes, scale = columns
        high = tiles * TILE
        codes = codes[:, : experts * high].unflatten(1, (experts, high)).transpose(0, 1)
        scale = scale[: experts * high // block].unflatten(0, (experts, high // block))
        return codes[:, :, :o], scale
    codes, scale = plain
    if is_square:
        scale = scale[:, : experts * tiles]
    return codes.view_as(matrices), scale.unflatten(1, (experts, -1)).transpose(0, 1)


def padded(ends: Tensor) -> int:
    """Return the number of experts, padded for a kernel."""
    return power_of_2(max(2, len(ends)))


@triton.jit
def _scale(amax, EXPONENT: tl.constexpr, MARGIN: tl.constexpr):
    """Return `low_precision.power_of_two` for the bits of the largest magnitude."""
    exponent = (amax >> 23) - 126 + tl.where((amax & 0x7FFFFF) > 0x600000, 1, 0)
    exponent = tl.where(amax == 0, 0, exponent) - EXPONENT + MARGIN
    exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax >= 0x7F800000, float("nan"), scale)


@triton.jit
def _codes(x, scale, EXPONENT: tl.constexpr):
    """Return x / scale within the format, whose largest value is 1.75 x 2^(EXPONENT - 1)."""
    LARGEST: tl.constexpr = 1.75 * 2.0 ** (EXPONENT - 1)
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
    tl.store(Codes + place, _codes(x, scale, EXPONENT).to(Codes.dtype.element_ty), mask=inside)


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
    codes = _codes(x, scale, EXPONENT).to(Codes.dtype.element_ty)
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
    codes = _codes(x, scale[:, None, :, None], EXPONENT)
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


@triton.jit
def bounds(Ends, experts, EXPERTS: tl.constexpr):
    """Return the begin and end of each expert's rows; those of the padding are equal."""
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < experts
    end = tl.load(Ends + expert, mask=is_expert, other=0)
    begin = tl.load(Ends + expert - 1, mask=is_expert & (expert > 0), other=0)
    return begin, end


@triton.jit
def rows_of_tile(Ends, experts, tile, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Return the expert of a tile, and the tile's first row and the end of the expert's rows.

    A tile after those of the last expert has no rows, and ``experts`` as its expert.
    """
    begin, end = bounds(Ends, experts, EXPERTS)
    tiles = tl.cdiv(end - begin, TILE)
    last = tl.cumsum(tiles, 0)  # number of tiles of each expert and those before it
    number = tl.arange(0, EXPERTS)
    expert = tl.sum(((last <= tile) & (number < experts)).to(tl.int32), 0)
    is_own = number == expert
    begin = tl.sum(tl.where(is_own, begin + (tile - last + tiles) * TILE, 0), 0)
    return expert, begin, tl.sum(tl.where(is_own, end, 0), 0)


@triton.jit
def _quantize_groups(
    X,
    Ends,
    Amax,
    Codes,
    Scale,
    Turned,
    ScaleTurned,
    m,
    columns,
    experts,
    tiles_down,
    EXPONENT: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SQUARE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_TURNED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
):
    down = tl.program_id(0) % tiles_down
    across = tl.program_id(0) // tiles_down
    expert, begin, end = rows_of_tile(Ends, experts, down, EXPERTS, TILE)
    row = begin + tl.arange(0, TILE)
    column = across * TILE + tl.arange(0, TILE)
    place = (down * TILE + tl.arange(0, TILE)).to(tl.int64)
    is_row = row < end
    is_column = column < columns
    inside = is_row[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    at_turned = column.to(tl.int64)[:, None] * tiles_down * TILE + place[None, :]
    if BLOCK == 0 and tl.program_id(0) == 0:
        every = tl.arange(0, EXPERTS)
        given = tl.load(Amax + every, mask=every < experts, other=0.0)
        scales = _scale(given.to(tl.int32, bitcast=True), EXPONENT, MARGIN)
        tl.store(Scale + every, scales, mask=every < experts)
    if begin < end:
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if BLOCK == 0 or IS_SQUARE:
            if BLOCK == 0:
                scale = _scale(tl.load(Amax + expert).to(tl.int32, bitcast=True), EXPONENT, MARGIN)
            else:
                scale = _scale(tl.max(tl.max(bits, 1), 0), EXPONENT, 0)
                tl.store(Scale + across * tiles_down + down, scale)
            codes = _codes(x, scale, EXPONENT).to(Codes.dtype.element_ty)
            if HAS_ROWS:
                tl.store(Codes + at, codes, mask=inside)
            if HAS_TURNED:
                tl.store(Turned + at_turned, tl.trans(codes), mask=is_column[:, None])
        else:
            BLOCKS: tl.constexpr = TILE // BLOCK
            number = tl.arange(0, BLOCKS)
            if HAS_ROWS:
                amax = tl.max(tl.reshape(bits, (TILE, BLOCKS, BLOCK)), 2)
                scale = _scale(amax, EXPONENT, 0)
                codes = _codes(tl.reshape(x, (TILE, BLOCKS, BLOCK)), scale[:, :, None], EXPONENT)
                codes = tl.reshape(codes.to(Codes.dtype.element_ty), (TILE, TILE))
                tl.store(Codes + at, codes, mask=inside)
                block = across * BLOCKS + number
                is_block = is_row[:, None] & (block * BLOCK < columns)[None, :]
                at_block = block.to(tl.int64)[None, :] * m + row[:, None]
                tl.store(Scale + at_block, scale, mask=is_block)
            if HAS_TURNED:
                amax = tl.max(tl.reshape(bits, (BLOCKS, BLOCK, TILE)), 1)
                scale = _scale(amax, EXPONENT, 0)
                codes = _codes(tl.reshape(x, (BLOCKS, BLOCK, TILE)), scale[:, None, :], EXPONENT)
                codes = tl.reshape(codes.to(Turned.dtype.element_ty), (TILE, TILE))
                tl.store(Turned + at_turned, tl.trans(codes), mask=is_column[:, None])
                block = (down * BLOCKS + number).to(tl.int64)
                at_block = block[:, None] * columns + column[None, :]
                tl.store(ScaleTurned + at_block, scale, mask=is_column[None, :])
