"""Sum the rows of each token: [m, h] -> [n, h], one read per row and one write per sum.

Plain torch moves five more times the bytes of a row for each entry after the first, and copies all
rows if some entries are empty.  Sums are in float32, in the order of the k entries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4


def sum_of_rows(rows: Tensor, row: Tensor) -> Tensor:
    """Sum ``row`` [n, k], the row numbers of each token; numbers >= m mean no row."""
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
