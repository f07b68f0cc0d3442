"""Rotary embedding of heads and of a packed QKV projection, in one read and one write.

In a packed projection [s, b, g, (r + 2) d], each of the g groups has r queries, a key and a value
of width d.  `split` returns rotated queries and keys, and values; `join` is its backward.  Plain
torch moves five times the tensor to rotate it, and copies the queries before.

One program handles one token of one sequence, and loads its cosines and sines once for all heads.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.launch import launch, power_of_2

_PAIRS = 2048
_WARPS = 4
_UNUSED = 0, 0, 0  # strides

Parts = tuple[Tensor, Tensor, Tensor]  # queries [s, b, g r, d], keys and values [s, b, g, d]
Angles = tuple[Tensor, Tensor]  # cos and sin [s, 1 or b, 1, rotated / 2]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotate the first r channels of [s, b, n, d] by the angle times ``sign``; copy the others.

    The channels of ``x`` are contiguous, and pairs not interleaved.
    """
    assert not interleaved, "the caller leaves interleaved pairs to torch"
    out = x.new_empty(x.shape)
    _launch(out, (x, None, None), (cos, sin), sign, joins=True)  # queries of one group
    return out


def split(packed: Tensor, width: int, at: Angles) -> Parts:
    """Return rotated queries and keys, and values, of ``packed``, which is contiguous."""
    s, b, groups, packed_width = packed.shape
    queries = groups * (packed_width // width - 2)
    query, key, value = (packed.new_empty(s, b, n, width) for n in (queries, groups, groups))
    _launch(packed, (query, key, value), at, 1, joins=False)
    return query, key, value


def join(grads: Parts, at: Angles) -> Tensor:
    """Return the gradient of `split`; the channels of ``grads`` are contiguous."""
    query, key, _ = grads
    s, b, groups, width = key.shape
    packed = query.new_empty(s, b, groups, (query.shape[2] // groups + 2) * width)
    _launch(packed, grads, at, -1, joins=True)
    return packed


def _launch(
    packed: Tensor,
    parts: tuple[Tensor, Tensor | None, Tensor | None],
    at: Angles,
    sign: int,
    *,
    joins: bool,
) -> None:
    """Move ``packed`` to ``parts``, or with ``joins`` parts to ``packed``."""
    if not packed.numel():
        return
    cos, sin = at
    query, key, value = parts
    s, b, heads, width = query.shape
    groups = 1 if key is None else key.shape[2]
    _, sequences, _, half = cos.shape
    tensors = packed, *parts, cos.contiguous(), sin.contiguous()
    numbers = (
        *query.stride()[:3],
        *(_UNUSED if key is None else key.stride()[:3]),
        *(_UNUSED if value is None else value.stride()[:3]),
        *((0, half) if sequences == 1 else (half, half * sequences)),
        *(b, groups, heads // groups, width, half),
        *(sign, joins, *_blocks(half, heads, width)),
    )
    launch(_rotate, (s * b,), tensors, numbers, _WARPS)


@cache
def _blocks(half: int, heads: int, width: int) -> tuple[bool, int, int, int, int]:
    """Return whether there is a tail after the rotated channels, and the sizes of blocks.

    These are heads and pairs of the rotation, heads and channels of a copy.
    """
    block = max(4, power_of_2(half))
    tail = power_of_2(width)
    heads = power_of_2(heads)
    rotated = max(1, min(_PAIRS // block, heads)), block
    copied = max(1, min(2 * _PAIRS // tail, heads)), tail
    return 2 * half < width, *rotated, *copied


@triton.jit
def _rotate(
    Packed,
    Query,
    Key,
    Value,
    Cos,
    Sin,
    query_s,
    query_b,
    query_n,
    key_s,
    key_b,
    key_n,
    value_s,
    value_b,
    value_n,
    table_b,
    table_s,
    num_sequences,
    groups,
    per_group,
    width,
    half,
    SIGN: tl.constexpr,
    JOINS: tl.constexpr,
    TAIL: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // num_sequences, token % num_sequences
    pair = s * table_s + b * table_b + tl.arange(0, HALF)
    is_pair = tl.arange(0, HALF) < half
    cos = tl.load(Cos + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(Sin + pair, mask=is_pair, other=0.0).to(tl.float32)[None, :] * SIGN
    each = per_group
    if Key is not None:
        each = per_group + 2
    packed = Packed + token * groups * each * width
    query = Query + s * query_s + b * query_b
    at_key = packed + per_group * width
    _move_heads(
        packed, query, query_n, per_group, groups * per_group, cos, sin, each, half, width,
        JOINS, True, TAIL, HEADS, HALF, COPIED, WIDTH,
    )  # fmt: skip
    if Key is not None:
        key = Key + s * key_s + b * key_b
        _move_heads(
            at_key, key, key_n, 1, groups, cos, sin, each, half, width,
            JOINS, True, TAIL, HEADS, HALF, COPIED, WIDTH,
        )  # fmt: skip
    if Value is not None:
        value = Value + s * value_s + b * value_b
        _move_heads(
            at_key + width, value, value_n, 1, groups, cos, sin, each, half, width,
            JOINS, False, True, HEADS, HALF, COPIED, WIDTH,
        )  # fmt: skip


@triton.jit
def _move_heads(
    packed,
    part,
    stride,
    per_group,
    num_heads,
    cos,
    sin,
    each,
    half,
    width,
    JOINS: tl.constexpr,
    TURNS: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy the heads of a token out of the packed projection, or back if it JOINS.

    The first 2 half channels are rotated if it TURNS, the others copied if it COPIES.  A group has
    ``each`` heads in the projection, and ``per_group`` of those to move.
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
            x, to = _ends(packed, part, stride, n, per_group, each * width, width, JOINS)
            u = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
            tl.store(to + first, (u * cos - v * sin).to(to.dtype.element_ty), mask=inside)
            tl.store(to + second, (v * cos + u * sin).to(to.dtype.element_ty), mask=inside)
    if COPIES:
        c = tl.arange(0, WIDTH)[None, :]
        is_copied = (c >= start) & (c < width)
        for begin in range(0, num_heads, COPIED):
            n = (begin + tl.arange(0, COPIED))[:, None]
            inside = (n < num_heads) & is_copied
            x, to = _ends(packed, part, stride, n, per_group, each * width, width, JOINS)
            tl.store(to + c, tl.load(x + c, mask=inside), mask=inside)


@triton.jit
def _ends(packed, part, stride, n, per_group, group, width, JOINS: tl.constexpr):
    """Return the addresses of heads to read and to write.

    Offsets have 64 bits: tokens may be the inner dimension.
    """
    x = packed + (n // per_group).to(tl.int64) * group + (n % per_group).to(tl.int64) * width
    to = part + n.to(tl.int64) * stride
    if JOINS:
        x, to = to, x
    return x, to
