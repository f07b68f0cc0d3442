"""The sum of each token's rows: [m, h] -> [n, h], each row read once and each sum written once.

Plain torch moves five times a row more for each visit after the first, and copies all rows where
some visits have none.  Sums are in the order of visits, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4


def sum_of_rows(rows: Tensor, row: Tensor) -> Tensor:
    """``row`` [n, k]: the rows of a token; a number of m or more stands for none."""
    width, (tokens, visits), row = rows.shape[1], row.shape, row.contiguous()
    out = rows.new_empty(tokens, width)
    if out.numel():
        block = max(128, min(_BLOCK, triton.next_power_of_2(width)))
        _sum_of_rows[(tokens, triton.cdiv(width, block))](
            rows, row, out, len(rows), width, VISITS=visits, BLOCK=block, num_warps=_WARPS
        )
    return out


@triton.jit
def _sum_of_rows(Rows, Row, Out, num_rows, width, VISITS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    total = tl.zeros((BLOCK,), tl.float32)
    for visit in tl.static_range(VISITS):
        row = tl.load(Row + token * VISITS + visit)
        at = row.to(tl.int64) * width + place
        present = tl.where(row < num_rows, width, 0)
        total += tl.load(Rows + at, mask=place < present, other=0.0).to(tl.float32)
    tl.store(Out + token * width + place, total.to(Out.dtype.element_ty), mask=inside)
