"""GEMMs of experts: rows sorted by expert, without row counts on the host.

``m`` rows, ``e`` experts; ``ends`` [e] int32 is the end of each expert's rows.  Rows after those of
the last expert belong to none, and their results are undefined.  Codes and scales are those of
`quantize`: one scale per expert, or one for each 128 or 32 values that a GEMM sums over.
torch's grouped GEMM of fp8 takes e4m3 alone, so that it could not compute the input gradients of
hybrid formats; it takes no blocks of 128, and cannot add to its output.

`add_products` adds weight gradients to the main gradients of all experts in one launch.  torch's
grouped GEMM would write the dtype of its inputs: the products would be rounded to 16 bits, then
read again to be added.  One GEMM per expert can add, but needs the row counts on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.quantize import (
    TILE,
    Codes,
    bounds,
    padded,
    rows_of_tile,
    tiles_of,
)

_STEP = 128
_DENSE_STEP = 64
_DENSE_STAGES = 3
_BAND = 8  # rows of tiles that run together, so that they share their inputs in the L2 cache
_WARPS = 8
_STAGES = {0: 3, 128: 3, 32: 2}  # by block; all fit into the shared memory of any GPU
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def product(
    rows: Codes,
    matrices: Codes,
    ends: Tensor,
    dtype: torch.dtype,
    *,
    block: int = 0,
    is_square: bool = False,
    fast: bool = False,
) -> Tensor:
    """Multiply each row by its expert's matrix: codes [m, k] and [e, n, k] -> [m, n].

    Scales of the matrices: [e], or with a ``block`` [e, k/block, n], or with ``is_square``
    [e, k/block, n/block].  Their strides are free; those of the matrices but for the last one.
    ``fast`` lets a GPU accumulate with fewer bits, if there is one scale per expert.
    """
    codes, scale = rows
    matrix, matrix_scale = matrices
    (m, k), (experts, n, _) = codes.shape, matrix.shape
    assert matrix.stride(2) == 1, "the GEMM sums over adjacent values"
    y = codes.new_empty((m, n), dtype=dtype)
    if y.numel():
        _product[(tiles_of(m, experts) * triton.cdiv(n, TILE),)](
            codes,
            scale,
            matrix,
            matrix_scale,
            ends,
            y,
            tiles_of(m, experts),
            experts,
            m,
            n,
            k,
            *matrix.stride()[:2],
            *(matrix_scale.stride() if block else (0, 0, 0)),
            A=_FORMATS[codes.dtype],
            B=_FORMATS[matrix.dtype],
            BLOCK=block,
            IS_SQUARE=is_square,
            FAST=fast,
            EXPERTS=padded(ends),
            TILE=TILE,
            STEP=_STEP,
            BAND=_BAND,
            num_warps=_WARPS,
            num_stages=_STAGES[block],
        )
    return y


def add_scaled_products(
    grad: Codes, rows: Codes, ends: Tensor, total: Tensor, *, keep: bool, block: int = 0
) -> None:
    """Add grad^T rows of each expert to ``total`` [e, o, i]; overwrite it unless ``keep``.

    ``grad`` and ``rows`` are transposed codes [o, p] and [i, p].  The matrices of ``total`` are
    contiguous.
    """
    left, left_scale = grad
    right, right_scale = rows
    experts, o, i = total.shape
    tiles = triton.cdiv(o, TILE) * triton.cdiv(i, TILE)
    if total.numel():
        _add_scaled_products[(tiles, experts)](
            left,
            left_scale,
            right,
            right_scale,
            ends,
            total,
            experts,
            o,
            i,
            left.shape[1],
            total.stride(0),
            A=_FORMATS[left.dtype],
            B=_FORMATS[right.dtype],
            BLOCK=block,
            KEEP=keep,
            EXPERTS=padded(ends),
            TILE=TILE,
            STEP=_STEP,
            BAND=_BAND,
            num_warps=_WARPS,
            num_stages=_STAGES[block],
        )


def add_products(grad: Tensor, rows: Tensor, ends: Tensor, total: Tensor, *, keep: bool) -> None:
    """Add grad^T rows of each expert to ``total``; overwrite it unless ``keep``.

    ``grad`` [m, o] and ``rows`` [m, i], both contiguous; ``ends`` [e]: the end of each expert's
    rows; ``total`` [e, o, i], whose matrices are contiguous.
    """
    experts, o, i = total.shape
    tiles = triton.cdiv(o, TILE) * triton.cdiv(i, TILE)
    if total.numel():
        _add_products[(tiles, experts)](
            grad,
            rows,
            ends,
            total,
            o,
            i,
            total.stride(0),
            KEEP=keep,
            TILE=TILE,
            STEP=_DENSE_STEP,
            BAND=_BAND,
            num_warps=_WARPS,
            num_stages=_DENSE_STAGES,
        )


@triton.jit
def _place_of(program, tiles_down, n, TILE: tl.constexpr, BAND: tl.constexpr):
    """Return the row and the column of a program's tile."""
    in_band = BAND * tl.cdiv(n, TILE)
    first = program // in_band * BAND
    high = tl.minimum(tiles_down - first, BAND)
    return first + program % in_band % high, program % in_band // high


@triton.jit
def _exponents(scale):
    """Return the bytes of e8m0 for scales, which are powers of two or NaN."""
    return (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def _scales(Left, is_left, Right, is_right, IS_SQUARE: tl.constexpr):
    """Return the scales of a block of values in a row, one value for a square block."""
    left = tl.load(Left, mask=is_left, other=0.0)
    right = tl.load(Right) if IS_SQUARE else tl.load(Right, mask=is_right, other=0.0)
    return left, right


@triton.jit
def _sums(
    Left,  # its rows, [TILE] pointers
    is_left,
    LeftScale,  # scales of the block at ``begin``, [TILE] pointers
    left_step,  # from a block's scales to those of the next one
    Right,
    is_right,
    RightScale,  # the same, or with square blocks one pointer
    right_step,
    begin,
    end,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SQUARE: tl.constexpr,
    FAST: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the product of a tile, summed from ``begin`` to ``end``; unscaled without blocks."""
    sums = tl.zeros((TILE, TILE), tl.float32)
    if BLOCK == STEP:  # scales are loaded one step before their matmul, which would wait for them
        scale_a, scale_b = _scales(LeftScale, is_left, RightScale, is_right, IS_SQUARE)
    for start in range(begin, end, STEP):
        inner = start + tl.arange(0, STEP)
        is_inner = inner < end
        a = tl.load(
            Left[:, None] + inner[None, :], mask=is_left[:, None] & is_inner[None, :], other=0.0
        )
        b = tl.load(
            Right[None, :] + inner[:, None], mask=is_inner[:, None] & is_right[None, :], other=0.0
        )
        if BLOCK == 0:
            if FAST:
                sums = tl.dot(a, b, sums, input_precision="ieee")
            else:
                sums = tl.dot(a, b, sums, input_precision="ieee", max_num_imprecise_acc=STEP)
        elif BLOCK == STEP:
            has_next = start + STEP < end
            LeftScale += tl.where(has_next, left_step, 0)
            RightScale += tl.where(has_next, right_step, 0)
            next_a, next_b = _scales(LeftScale, is_left, RightScale, is_right, IS_SQUARE)
            part = tl.dot(a, b, input_precision="ieee")
            if IS_SQUARE:
                sums += part * (scale_a * scale_b)[:, None]
            else:
                sums += part * (scale_a[:, None] * scale_b[None, :])
            scale_a = next_a
            scale_b = next_b
        else:
            number = tl.arange(0, STEP // BLOCK)[None, :]
            is_block = start + number * BLOCK < end
            at_a = LeftScale[:, None] + number.to(tl.int64) * left_step
            at_b = RightScale[:, None] + number.to(tl.int64) * right_step
            scale_a = tl.load(at_a, mask=is_left[:, None] & is_block, other=0.0)
            scale_b = tl.load(at_b, mask=is_right[:, None] & is_block, other=0.0)
            sums = tl.dot_scaled(a, _exponents(scale_a), A, b, _exponents(scale_b), B, sums)
            LeftScale += STEP // BLOCK * left_step
            RightScale += STEP // BLOCK * right_step
    return sums


@triton.jit
def _product(
    Rows,
    RowsScale,
    Matrices,
    MatricesScale,
    Ends,
    Y,
    tiles_down,
    experts,
    m,
    n,
    k,
    matrix_stride,
    column_stride,
    scale_matrix_stride,
    scale_block_stride,
    scale_column_stride,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SQUARE: tl.constexpr,
    FAST: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    down, across = _place_of(tl.program_id(0), tiles_down, n, TILE, BAND)
    expert, begin, end = rows_of_tile(Ends, experts, down, EXPERTS, TILE)
    row = begin + tl.arange(0, TILE)
    column = across * TILE + tl.arange(0, TILE)
    is_row = row < end
    is_column = column < n
    own = tl.minimum(expert, experts - 1).to(tl.int64)
    scale_of = across if IS_SQUARE else column  # a square block is as wide as a tile
    sums = _sums(
        Rows + row.to(tl.int64) * k,
        is_row,
        RowsScale + row,
        m,
        Matrices + own * matrix_stride + column.to(tl.int64) * column_stride,
        is_column,
        MatricesScale + own * scale_matrix_stride + scale_of.to(tl.int64) * scale_column_stride,
        scale_block_stride,
        0,
        tl.where(begin < end, k, 0),
        A,
        B,
        BLOCK,
        IS_SQUARE,
        FAST,
        TILE,
        STEP,
    )
    if BLOCK == 0:
        sums *= tl.load(RowsScale + own) * tl.load(MatricesScale + own)
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(Y + at, sums.to(Y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_scaled_products(
    Grad,
    GradScale,
    Rows,
    RowsScale,
    Ends,
    Total,
    experts,
    o,
    i,
    length,
    expert_stride,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    down, across = _place_of(tl.program_id(0), tl.cdiv(o, TILE), i, TILE, BAND)
    expert = tl.program_id(1)
    begin, end = bounds(Ends, experts, EXPERTS)
    tiles = tl.cdiv(end - begin, TILE)
    number = tl.arange(0, EXPERTS)
    first = tl.sum(tl.where(number < expert, tiles, 0), 0) * TILE
    last = first + tl.sum(tl.where(number == expert, tiles, 0), 0) * TILE
    at_o = down * TILE + tl.arange(0, TILE)
    at_i = across * TILE + tl.arange(0, TILE)
    is_o = at_o < o
    is_i = at_i < i
    block = (first // (BLOCK if BLOCK else 1)).to(tl.int64)
    sums = _sums(
        Grad + at_o.to(tl.int64) * length,
        is_o,
        GradScale + block * o + at_o,
        o,
        Rows + at_i.to(tl.int64) * length,
        is_i,
        RowsScale + block * i + at_i,
        i,
        first,
        last,
        A,
        B,
        BLOCK,
        False,
        False,
        TILE,
        STEP,
    )
    if BLOCK == 0:
        sums *= tl.load(GradScale + expert) * tl.load(RowsScale + expert)
    total = Total + expert.to(tl.int64) * expert_stride
    _add_tile(total, sums, at_o, at_i, o, i, first < last, KEEP)


@triton.jit
def _add_tile(total, sums, at_o, at_i, o, i, has_rows, KEEP: tl.constexpr):
    """Add a tile to an expert's matrix, or overwrite it; without rows, neither read nor write."""
    at = total + at_o.to(tl.int64)[:, None] * i + at_i[None, :]
    is_i = at_i < i
    if KEEP:
        is_i = at_i < tl.where(has_rows, i, 0)
    inside = (at_o < o)[:, None] & is_i[None, :]
    if KEEP:
        sums += tl.load(at, mask=inside, other=0).to(tl.float32)
    tl.store(at, sums.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _add_products(
    Grad,
    Rows,
    Ends,
    Total,
    o,
    i,
    expert_stride,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
):
    expert = tl.program_id(1)
    begin = tl.where(expert > 0, tl.load(Ends + tl.maximum(expert - 1, 0)), 0)
    end = tl.load(Ends + expert)
    down, across = _place_of(tl.program_id(0), tl.cdiv(o, TILE), i, TILE, BAND)
    at_o = down * TILE + tl.arange(0, TILE)
    at_i = across * TILE + tl.arange(0, TILE)
    is_o = at_o < o
    is_i = at_i < i
    sums = tl.zeros((TILE, TILE), tl.float32)
    for start in range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        is_row = row < end
        place = row.to(tl.int64)[:, None]
        is_a = is_row[:, None] & is_o[None, :]
        is_b = is_row[:, None] & is_i[None, :]
        a = tl.load(Grad + place * o + at_o[None, :], mask=is_a, other=0.0)
        b = tl.load(Rows + place * i + at_i[None, :], mask=is_b, other=0.0)
        sums = tl.dot(tl.trans(a), b, sums, input_precision="ieee")
    _add_tile(
        Total + expert.to(tl.int64) * expert_stride, sums, at_o, at_i, o, i, begin < end, KEEP
    )
