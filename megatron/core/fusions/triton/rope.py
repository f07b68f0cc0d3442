"""Rotary embedding: [s, b, n, d] -> [s, b, n, d] in one read and one write.

Plain torch moves five times the tensor, this kernel twice.  One program handles one token of one
sequence, and loads its cosines and sines once for all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.launch import launch, power_of_2

_PAIRS, _WARPS = 2048, 4


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotate the first r channels by the angle times ``sign``; copy the others.

    The channels of ``x`` are contiguous, and pairs not interleaved; ``cos`` and ``sin`` are
    [s, 1 or b, 1, r/2].
    """
    assert not interleaved, "the caller leaves interleaved pairs to torch"
    s, b, n, d = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[-1]
    out = x.new_empty(x.shape)
    if not out.numel():
        return out
    block = max(4, power_of_2(half))
    tail = power_of_2(d)
    heads = power_of_2(n)
    numbers = (
        *x.stride()[:3],
        0 if cos.shape[1] == 1 else half,
        half * cos.shape[1],
        b,
        n,
        d,
        half,
        sign,
        2 * half < d,
        max(1, min(_PAIRS // block, heads)),
        block,
        max(1, min(2 * _PAIRS // tail, heads)),
        tail,
    )
    launch(_turn, (s * b,), (x, cos, sin, out), numbers, _WARPS)
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
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // num_sequences, token % num_sequences
    x, out = X + s * stride_s + b * stride_b, Out + token * num_heads * width
    cos, sin = load_angles(Cos, Sin, s * table_s + b * table_b, half, SIGN, HALF)
    # All heads are one group.
    move_heads(
        x,
        stride_n,
        0,
        out,
        width,
        0,
        num_heads,
        num_heads,
        cos,
        sin,
        half,
        width,
        True,
        COPIES,
        HEADS,
        HALF,
        COPIED,
        WIDTH,
    )


@triton.jit
def load_angles(Cos, Sin, at, half, SIGN: tl.constexpr, HALF: tl.constexpr):
    """Load the cosines and sines of a token, [1, HALF] each."""
    pair = tl.arange(0, HALF)
    cos = tl.load(Cos + at + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(Sin + at + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :] * SIGN
    return cos, sin


@triton.jit
def move_heads(
    From,
    from_head,
    from_group,
    To,
    to_head,
    to_group,
    per_group,
    num_heads,
    cos,
    sin,
    half,
    width,
    TURNS: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy the heads of a token: the first 2 half channels rotated if it TURNS, the rest if COPIES.

    Head n is at (n // per_group) * group + (n % per_group) * head on each side.
    """
    start = 0
    if TURNS:
        start = 2 * half
        pair = tl.arange(0, HALF)
        first = pair[None, :]
        second = first + half
        for begin in range(0, num_heads, HEADS):
            n = (begin + tl.arange(0, HEADS))[:, None]
            inside = (n < num_heads) & (pair < half)[None, :]
            x = From + _of_heads(n, per_group, from_group, from_head)
            u = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
            to = To + _of_heads(n, per_group, to_group, to_head)
            tl.store(to + first, (u * cos - v * sin).to(To.dtype.element_ty), mask=inside)
            tl.store(to + second, (v * cos + u * sin).to(To.dtype.element_ty), mask=inside)
    if COPIES:
        c = tl.arange(0, WIDTH)[None, :]
        is_copied = (c >= start) & (c < width)
        for begin in range(0, num_heads, COPIED):
            n = (begin + tl.arange(0, COPIED))[:, None]
            inside = (n < num_heads) & is_copied
            x = From + _of_heads(n, per_group, from_group, from_head)
            to = To + _of_heads(n, per_group, to_group, to_head)
            tl.store(to + c, tl.load(x + c, mask=inside), mask=inside)


@triton.jit
def _of_heads(n, per_group, group, head):
    """Return the offsets of heads; tokens may be the inner dimension: beyond 2^31 values."""
    return (n // per_group).to(tl.int64) * group + (n % per_group).to(tl.int64) * head
