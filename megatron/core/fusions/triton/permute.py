"""Order the rows of experts, and sum the rows of each token.

A stable sort of N token-expert assignments is several launches that move all of them.  Here one
program per expert counts the assignments to lower experts, then numbers its own: it reads the N
values twice, from cache.

To sum rows [m, h] -> [n, h], plain torch moves five more times the bytes of a row for each entry
after the first, and copies all rows if some entries are empty.  Here is one read per row and one
write per sum.  Sums are in float32, in the order of the k entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8
_SUM_BLOCK = 1024
_SUM_WARPS = 4


def order_by_expert(experts: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Map ``experts`` [N], 0 to ``highest``, to each row's assignment and each assignment's row."""
    visit, row = torch.empty_like(experts), torch.empty_like(experts)
    if len(experts):
        block = max(128, min(_BLOCK, triton.next_power_of_2(len(experts))))
        _order_by_expert[(highest + 1,)](
            experts, visit, row, len(experts), BLOCK=block, num_warps=_WARPS
        )
    return visit, row


@triton.jit
def _order_by_expert(Experts, Visit, Row, num_visits, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    before = tl.zeros((), tl.int64)
    for start in range(0, num_visits, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(Experts + place, mask=place < num_visits, other=expert)
        before += tl.sum((number < expert).to(tl.int64), 0)
    for start in range(0, num_visits, BLOCK):
        place = start + tl.arange(0, BLOCK)
        number = tl.load(Experts + place, mask=place < num_visits, other=-1)
        mine = number == expert
        row = before + tl.cumsum(mine.to(tl.int64), 0) - 1
        tl.store(Row + place, row, mask=mine)
        tl.store(Visit + row, place.to(tl.int64), mask=mine)
        before += tl.sum(mine.to(tl.int64), 0)


def sum_of_rows(rows: Tensor, row: Tensor) -> Tensor:
    """Sum rows [m, h] by the indices ``row`` [n, k] of each token; indices >= m are skipped."""
    width, (tokens, visits), row = rows.shape[1], row.shape, row.contiguous()
    out = rows.new_empty(tokens, width)
    if out.numel():
        block = max(128, min(_SUM_BLOCK, triton.next_power_of_2(width)))
        _sum_of_rows[(tokens, triton.cdiv(width, block))](
            rows, row, out, len(rows), width, VISITS=visits, BLOCK=block, num_warps=_SUM_WARPS
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
