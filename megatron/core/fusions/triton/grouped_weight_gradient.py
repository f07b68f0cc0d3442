"""Add the weight gradients of all experts to their main gradients, in one launch.

``m`` rows sorted by expert, ``e`` experts with weights [o, i].  torch's grouped GEMM cannot add to
its output, and writes the dtype of its inputs: the products would be rounded to 16 bits, then read
again to be added.  One GEMM per expert can add, but needs the row counts on the host.  Each program
sums one tile of one expert's product in float32 and adds it to the main gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE, _STEP = 128, 64
_BAND = 8  # rows of tiles that run together, so that they share their inputs in the L2 cache
_WARPS, _STAGES = 8, 3


def add_products(grad: Tensor, rows: Tensor, ends: Tensor, total: Tensor, *, keep: bool) -> None:
    """Add grad^T rows of each expert to ``total``; overwrite it unless ``keep``.

    ``grad`` [m, o] and ``rows`` [m, i], both contiguous; ``ends`` [e]: the end of each expert's
    rows; ``total`` [e, o, i], whose matrices are contiguous.
    """
    experts, o, i = total.shape
    tiles = triton.cdiv(o, _TILE) * triton.cdiv(i, _TILE)
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
            TILE=_TILE,
            STEP=_STEP,
            BAND=_BAND,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )


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
    tiles_down = tl.cdiv(o, TILE)
    in_band = BAND * tl.cdiv(i, TILE)
    first = tl.program_id(0) // in_band * BAND
    high = tl.minimum(tiles_down - first, BAND)
    down = first + tl.program_id(0) % in_band % high
    across = tl.program_id(0) % in_band // high
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
    at = Total + expert.to(tl.int64) * expert_stride
    at += at_o.to(tl.int64)[:, None] * i + at_i[None, :]
    if KEEP:  # without rows, neither read nor write
        is_i = at_i < tl.where(begin < end, i, 0)
    inside = is_o[:, None] & is_i[None, :]
    if KEEP:
        sums += tl.load(at, mask=inside, other=0).to(tl.float32)
    tl.store(at, sums.to(Total.dtype.element_ty), mask=inside)
