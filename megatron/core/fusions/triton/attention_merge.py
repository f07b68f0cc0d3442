"""Merge two attention results in one kernel: reads both outputs, writes one.

Plain torch launches ten kernels, three of which move the float32 output.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_VALUES, _WARPS = 4096, 4  # of a program


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge part [b, n, q, d], part_lse [b, n, q] into out and lse; any strides but the last."""
    rows, heads, queries, width = out.shape
    block = triton.next_power_of_2(width)
    at_once = max(1, _VALUES // block)
    if out.numel():
        _merge_attention[(triton.cdiv(queries, at_once) * rows * heads,)](
            out,
            lse,
            part,
            part_lse,
            *(out.stride()[:3] + lse.stride() + part.stride()[:3] + part_lse.stride()),
            heads,
            queries,
            width,
            ROWS=at_once,
            BLOCK=block,
            num_warps=_WARPS,
        )


@triton.jit
def _merge_attention(
    Out,
    Lse,
    Part,
    PartLse,
    out_b,
    out_n,
    out_q,
    lse_b,
    lse_n,
    lse_q,
    part_b,
    part_n,
    part_q,
    part_lse_b,
    part_lse_n,
    part_lse_q,
    num_heads,
    num_queries,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(num_queries, ROWS)
    head = tl.program_id(0) // blocks
    b = (head // num_heads).to(tl.int64)
    n = (head % num_heads).to(tl.int64)
    q = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    has_query = q < num_queries
    lse_at = Lse + b * lse_b + n * lse_n + q * lse_q
    part_lse_at = PartLse + b * part_lse_b + n * part_lse_n + q * part_lse_q
    old = tl.load(lse_at, mask=has_query, other=0.0)
    new = tl.load(part_lse_at, mask=has_query, other=0.0).to(tl.float32)
    # A common maximum of -inf, no key yet: -inf - -inf would be NaN.
    largest = tl.maximum(old, new)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    old_weight = tl.exp(old - base)
    new_weight = tl.exp(new - base)
    both = old_weight + new_weight
    scale = 1.0 / tl.where(both == 0.0, 1.0, both)
    # Several warps load the same log-sum-exp, and one stores it.
    tl.debug_barrier()
    tl.store(lse_at, base + tl.log(both), mask=has_query)
    d = tl.arange(0, BLOCK)
    inside = has_query[:, None] & (d < width)[None, :]
    out_at = Out + b * out_b + n * out_n + (q * out_q)[:, None] + d[None, :]
    part_at = Part + b * part_b + n * part_n + (q * part_q)[:, None] + d[None, :]
    before = tl.load(out_at, mask=inside, other=0.0)
    block = tl.load(part_at, mask=inside, other=0.0).to(tl.float32)
    merged = before * (old_weight * scale)[:, None] + block * (new_weight * scale)[:, None]
    tl.store(out_at, merged, mask=inside)
