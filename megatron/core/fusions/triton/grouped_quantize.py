"""Quantize the rows of all experts to fp8 in one kernel, without row counts on the host.

``m`` rows [m, c], sorted by expert; ``e`` experts; ``ends`` [e] int32 is the end of each expert's
rows.  Rows after those of the last expert belong to none.  Codes and scales are those that
`quantize` computes for each expert's rows alone: one scale per expert, or one per block, of which
each expert's first one begins at its first row.

A GEMM that sums over rows reads transposed codes [c, p].  Each expert's columns begin at a multiple
of `TILE` there and end with zeros, so that the GEMM copies 16 bytes at a time; ``p`` is
`padded_length`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.launch import power_of_2
from megatron.core.fusions.triton.quantize import _EXPONENTS, _codes, _scale

TILE = 128
# Block of a program that searches the largest magnitudes.
_ROWS = 16
_COLUMNS = 256
_WARPS = 8


# Codes and scales.  A GEMM sums over the last dimension of the codes: [m, c], or transposed [c, p].
# Scales: [e] with one per expert; [c/b, m] or [p/b, c] with one for each ``b`` values of a row;
# [c/b, p/b] with square blocks, for both.
Codes = tuple[Tensor, Tensor]


def tiles_of(num_rows: int, num_experts: int) -> int:
    """Return the most tiles of rows there can be: each expert begins with one of its own."""
    return -(-num_rows // TILE) + num_experts


def padded_length(num_rows: int, num_experts: int) -> int:
    """Return the number of columns of transposed codes."""
    return tiles_of(num_rows, num_experts) * TILE


def amax_of_groups(x: Tensor, ends: Tensor) -> Tensor:
    """Return the largest magnitude of each expert's rows of ``x`` [m, c]: [e] fp32."""
    found = x.new_zeros(len(ends), dtype=torch.int32)
    if x.numel():
        _amax_of_groups[(triton.cdiv(len(x), _ROWS),)](
            x,
            ends,
            found,
            *x.shape,
            len(ends),
            EXPERTS=padded(ends),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
    return found.view(torch.float32)


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
    length = padded_length(m, experts)
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
    exponent = _EXPONENTS[to]
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
        EXPONENT=exponent,
        LARGEST=1.75 * 2.0 ** (exponent - 1),
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
def _amax_of_groups(
    X,
    Ends,
    Found,
    m,
    columns,
    experts,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin, end = bounds(Ends, experts, EXPERTS)
    is_over = (tl.arange(0, EXPERTS)[None, :] < experts) & (end[None, :] <= row[:, None])
    expert = tl.sum(is_over.to(tl.int32), 1)  # ``experts`` for rows of none
    amax = tl.zeros((ROWS,), tl.int32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < m)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
    tl.atomic_max(Found + expert, amax, mask=(row < m) & (expert < experts))


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
    LARGEST: tl.constexpr,
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
            codes = _codes(x, scale, LARGEST).to(Codes.dtype.element_ty)
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
                codes = _codes(tl.reshape(x, (TILE, BLOCKS, BLOCK)), scale[:, :, None], LARGEST)
                codes = tl.reshape(codes.to(Codes.dtype.element_ty), (TILE, TILE))
                tl.store(Codes + at, codes, mask=inside)
                block = across * BLOCKS + number
                is_block = is_row[:, None] & (block * BLOCK < columns)[None, :]
                at_block = block.to(tl.int64)[None, :] * m + row[:, None]
                tl.store(Scale + at_block, scale, mask=is_block)
            if HAS_TURNED:
                amax = tl.max(tl.reshape(bits, (BLOCKS, BLOCK, TILE)), 1)
                scale = _scale(amax, EXPONENT, 0)
                codes = _codes(tl.reshape(x, (BLOCKS, BLOCK, TILE)), scale[:, None, :], LARGEST)
                codes = tl.reshape(codes.to(Turned.dtype.element_ty), (TILE, TILE))
                tl.store(Turned + at_turned, tl.trans(codes), mask=is_column[:, None])
                block = (down * BLOCKS + number).to(tl.int64)
                at_block = block[:, None] * columns + column[None, :]
                tl.store(ScaleTurned + at_block, scale, mask=is_column[None, :])
