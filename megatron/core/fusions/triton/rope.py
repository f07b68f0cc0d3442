"""Rotary embedding: [s, b, n, d] -> [s, b, n, d] in one read and one write.

Plain torch moves five times the tensor, this kernel twice.  One program handles one token of one
sequence, and loads its cosines and sines once for all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PAIRS, _WARPS = 2048, 4


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotate the first r channels by the angle times ``sign``; copy the others.

    The channels of ``x`` are contiguous; ``cos`` and ``sin`` are [s, 1 or b, 1, r/2].
    """
    s, b, n, d = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[-1]
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    block = max(4, triton.next_power_of_2(half))
    tail = triton.next_power_of_2(d)
    _turn[(s * b,)](
        x,
        cos,
        sin,
        out,
        *x.stride()[:3],
        0 if cos.shape[1] == 1 else half,
        half * cos.shape[1],
        b,
        n,
        d,
        half,
        SIGN=sign,
        STEP=2 if interleaved else 1,
        COPIES=2 * half < d,
        HEADS=max(1, min(_PAIRS // block, triton.next_power_of_2(n))),
        HALF=block,
        COPIED=max(1, min(2 * _PAIRS // tail, triton.next_power_of_2(n))),
        WIDTH=tail,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def _turn(
    X,
    Cos,
    Sin,
    Out,
    stride_s,
    stride_b,
    stride_n,
    table_b,
    table_s,
    num_sequences,
    num_heads,
    width,
    half,
    SIGN: tl.constexpr,
    STEP: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // num_sequences, token % num_sequences
    x, out = X + s * stride_s + b * stride_b, Out + token * num_heads * width
    pair = tl.arange(0, HALF)
    at = s * table_s + b * table_b + pair
    cos = tl.load(Cos + at, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(Sin + at, mask=pair < half, other=0.0).to(tl.float32)[None, :] * SIGN
    first = (pair * STEP)[None, :]
    second = first + (1 if STEP == 2 else half)
    for begin in range(0, num_heads, HEADS):
        n = (begin + tl.arange(0, HEADS))[:, None]
        inside = (n < num_heads) & (pair < half)[None, :]
        u = tl.load(x + n * stride_n + first, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + n * stride_n + second, mask=inside, other=0.0).to(tl.float32)
        to = out + n * width
        tl.store(to + first, (u * cos - v * sin).to(Out.dtype.element_ty), mask=inside)
        tl.store(to + second, (v * cos + u * sin).to(Out.dtype.element_ty), mask=inside)
    if COPIES:
        c = tl.arange(0, WIDTH)[None, :]
        is_copied = (c >= 2 * half) & (c < width)
        for begin in range(0, num_heads, COPIED):
            n = (begin + tl.arange(0, COPIED))[:, None]
            inside = (n < num_heads) & is_copied
            tl.store(out + n * width + c, tl.load(x + n * stride_n + c, mask=inside), mask=inside)
