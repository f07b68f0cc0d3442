"""Sort token-expert assignments by expert, by counting: [N] -> [N] twice, in one launch.

A stable sort of N values is several launches that move all of them.  Here one program per expert
counts the assignments to lower experts, then numbers its own: it reads the N values twice, from
cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


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
