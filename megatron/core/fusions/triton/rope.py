"""Rotary embedding of heads and of a packed QKV projection, in one read and one write.

In a packed projection [s, b, g, (r + 2) d], each of the g groups has r queries, a key and a value
of width d.  `split` returns rotated queries and keys, and values, after an RMSNorm of each query
and key if asked; `join` is its backward.  Plain torch moves five times the tensor to rotate it,
copies the queries before, and reads and writes queries and keys once more for the norm.

One program handles one token of one sequence, and loads its cosines and sines once for all heads.
Backward of the norms, each of a fixed number of programs handles a range of tokens, computes the
statistics again and sums the gradients of the weights; these sums are then added in a fixed order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.launch import launch, power_of_2

_PAIRS = 2048
_WARPS = 4
_PROGRAMS = 1056  # in backward of norms: eight for each of the 132 processors of an H100
_UNUSED = 0, 0, 0  # strides

Parts = tuple[Tensor, Tensor, Tensor]  # queries [s, b, g r, d], keys and values [s, b, g, d]
Angles = tuple[Tensor, Tensor]  # cos and sin [s, 1 or b, 1, rotated / 2]
Norms = tuple[Tensor, Tensor, float]  # weights [d] for queries and keys, and epsilon


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sign: int) -> Tensor:
    """Rotate the first r channels of [s, b, n, d] by the angle times ``sign``; copy the others.

    The channels of ``x`` are contiguous, and pairs not interleaved.
    """
    assert not interleaved, "the caller leaves interleaved pairs to torch"
    out = x.new_empty(x.shape)
    _launch(out, (x, None, None), (cos, sin), sign, joins=True)  # queries of one group
    return out


def split(packed: Tensor, width: int, at: Angles, norms: Norms | None) -> Parts:
    """Return rotated queries and keys, and values, of ``packed``, which is contiguous."""
    s, b, groups, packed_width = packed.shape
    queries = groups * (packed_width // width - 2)
    query, key, value = (packed.new_empty(s, b, n, width) for n in (queries, groups, groups))
    _launch(packed, (query, key, value), at, 1, joins=False, norms=norms)
    return query, key, value


def join(grads: Parts, at: Angles) -> Tensor:
    """Return the gradient of `split` without norms; the channels of ``grads`` are contiguous."""
    query, key, _ = grads
    s, b, groups, width = key.shape
    packed = query.new_empty(s, b, groups, (query.shape[2] // groups + 2) * width)
    _launch(packed, grads, at, -1, joins=True)
    return packed


def join_norms(
    packed: Tensor, grads: Parts, at: Angles, norms: Norms
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``packed`` and of both weights, of contiguous ``grads``."""
    cos, sin = at
    query, key, _ = grads
    s, b, groups, width = key.shape
    tokens = s * b
    heads = query.shape[2]
    half = cos.shape[-1]
    *weights, eps = norms
    programs = max(1, min(tokens, _PROGRAMS))
    out = torch.empty_like(packed)
    sums = packed.new_empty(programs, 2, width, dtype=torch.float32)
    tensors = packed, out, *grads, *weights, sums, cos.contiguous(), sin.contiguous()
    numbers = (
        *(*_table_strides(cos), b, groups, heads // groups, width, half, eps),
        *(tokens, -(-tokens // programs), *_blocks(half, heads, width)),
    )
    launch(_join_norms, (programs,), tensors, numbers, _WARPS)
    of_query, of_key = sums.sum(0).to(query.dtype)
    return out, of_query, of_key


def _launch(
    packed: Tensor,
    parts: tuple[Tensor, Tensor | None, Tensor | None],
    at: Angles,
    sign: int,
    *,
    joins: bool,
    norms: Norms | None = None,
) -> None:
    """Move ``packed`` to ``parts``, or with ``joins`` parts to ``packed``."""
    if not packed.numel():
        return
    cos, sin = at
    query, key, value = parts
    s, b, heads, width = query.shape
    groups = 1 if key is None else key.shape[2]
    half = cos.shape[-1]
    *weights, eps = norms or (None, None, 0.0)
    tensors = packed, *parts, *weights, cos.contiguous(), sin.contiguous()
    numbers = (
        *query.stride()[:3],
        *(_UNUSED if key is None else key.stride()[:3]),
        *(_UNUSED if value is None else value.stride()[:3]),
        *(*_table_strides(cos), b, groups, heads // groups, width, half, eps),
        *(sign, joins, *_blocks(half, heads, width)),
    )
    launch(_rotate, (s * b,), tensors, numbers, _WARPS)


def _table_strides(cos: Tensor) -> tuple[int, int]:
    """Return the strides of sequences and of tokens in a table [s, 1 or b, 1, half]."""
    _, sequences, _, half = cos.shape
    return 0 if sequences == 1 else half, half * sequences


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
    QueryWeight,
    KeyWeight,
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
    eps,
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
    cos, sin = _load_angles(Cos, Sin, s * table_s + b * table_b, half, SIGN, HALF)
    each = per_group
    if Key is not None:
        each = per_group + 2
    packed = Packed + token * groups * each * width
    query = Query + s * query_s + b * query_b
    at_key = packed + per_group * width
    if QueryWeight is not None:
        REST: tl.constexpr = WIDTH if TAIL else 1
        group = each * width
        key = Key + s * key_s + b * key_b
        _norm_heads(
            packed, query, query_n, QueryWeight, cos, sin, eps,
            per_group, group, groups * per_group, half, width, TAIL, COPIED, HALF, REST,
        )  # fmt: skip
        _norm_heads(
            at_key, key, key_n, KeyWeight, cos, sin, eps,
            1, group, groups, half, width, TAIL, COPIED, HALF, REST,
        )  # fmt: skip
    else:
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
def _load_angles(Cos, Sin, at, half, SIGN: tl.constexpr, HALF: tl.constexpr):
    """Load the cosines and sines of a token, [1, HALF] each."""
    pair = tl.arange(0, HALF)
    cos = tl.load(Cos + at + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(Sin + at + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :] * SIGN
    return cos, sin


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


@triton.jit
def _places(half, width, HALF: tl.constexpr, REST: tl.constexpr):
    """Return the channels of the first and second values of pairs and of the tail, and masks.

    REST: at least as many as the channels of the tail and those before it; 1 without a tail.
    """
    first = tl.arange(0, HALF)
    channel = tl.arange(0, REST)
    return first, first + half, channel, first < half, (channel >= 2 * half) & (channel < width)


@triton.jit
def _load_row(Row, first, second, channel, is_pair, is_tail):
    """Load a row of width d as [1, ..]: first and second values of pairs, and the tail."""
    u = tl.load(Row + first, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    v = tl.load(Row + second, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    t = tl.load(Row + channel, mask=is_tail, other=0.0).to(tl.float32)[None, :]
    return u, v, t


@triton.jit
def _load_heads(X, n, is_head, first, second, channel, is_pair, is_tail, TAIL: tl.constexpr):
    """Load heads at the addresses X [n, 1]."""
    is_pair = is_head & is_pair[None, :]
    is_tail = is_head & is_tail[None, :]
    u = tl.load(X + first[None, :], mask=is_pair, other=0.0).to(tl.float32)
    v = tl.load(X + second[None, :], mask=is_pair, other=0.0).to(tl.float32)
    t = tl.zeros(is_tail.shape, tl.float32)
    if TAIL:
        t = tl.load(X + channel[None, :], mask=is_tail, other=0.0).to(tl.float32)
    return u, v, t


@triton.jit
def _store_heads(X, u, v, t, is_head, first, second, channel, is_pair, is_tail, TAIL: tl.constexpr):
    is_pair = is_head & is_pair[None, :]
    is_tail = is_head & is_tail[None, :]
    tl.store(X + first[None, :], u.to(X.dtype.element_ty), mask=is_pair)
    tl.store(X + second[None, :], v.to(X.dtype.element_ty), mask=is_pair)
    if TAIL:
        tl.store(X + channel[None, :], t.to(X.dtype.element_ty), mask=is_tail)


@triton.jit
def _sum_of(u, v, t):
    """Sum over the channels of each head: [n, 1]."""
    return (tl.sum(u, 1) + tl.sum(v, 1) + tl.sum(t, 1))[:, None]


@triton.jit
def _norm_heads(
    packed, part, stride, Weight, cos, sin, eps, per_group, group, num_heads, half, width,
    TAIL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate the heads of a token."""
    first, second, channel, is_pair, is_tail = _places(half, width, HALF, REST)
    wu, wv, wt = _load_row(Weight, first, second, channel, is_pair, is_tail)
    for begin in range(0, num_heads, HEADS):
        n = (begin + tl.arange(0, HEADS))[:, None]
        is_head = n < num_heads
        x = packed + (n // per_group) * group + (n % per_group) * width
        u, v, t = _load_heads(x, n, is_head, first, second, channel, is_pair, is_tail, TAIL)
        scale = 1 / tl.sqrt_rn(_sum_of(u * u, v * v, t * t) / width + eps)
        u = u * scale * wu
        v = v * scale * wv
        t = t * scale * wt
        _store_heads(
            part + n * stride, u * cos - v * sin, v * cos + u * sin, t,
            is_head, first, second, channel, is_pair, is_tail, TAIL,
        )  # fmt: skip


@triton.jit
def _norm_heads_backward(
    packed, out, grad, Weight, cos, sin, of_u, of_v, of_t, eps, per_group, group, num_heads, half,
    width, TAIL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the heads of a token; return the sums for the weight, updated."""
    first, second, channel, is_pair, is_tail = _places(half, width, HALF, REST)
    wu, wv, wt = _load_row(Weight, first, second, channel, is_pair, is_tail)
    for begin in range(0, num_heads, HEADS):
        n = (begin + tl.arange(0, HEADS))[:, None]
        is_head = n < num_heads
        at = (n // per_group) * group + (n % per_group) * width
        u, v, t = _load_heads(
            packed + at, n, is_head, first, second, channel, is_pair, is_tail, TAIL
        )
        scale = 1 / tl.sqrt_rn(_sum_of(u * u, v * v, t * t) / width + eps)
        u = u * scale
        v = v * scale
        t = t * scale
        a, b, gt = _load_heads(
            grad + n * width, n, is_head, first, second, channel, is_pair, is_tail, TAIL
        )
        gu = a * cos + b * sin
        gv = b * cos - a * sin
        of_u += tl.sum(gu * u, 0)
        of_v += tl.sum(gv * v, 0)
        of_t += tl.sum(gt * t, 0)
        gu = gu * wu
        gv = gv * wv
        gt = gt * wt
        along = _sum_of(gu * u, gv * v, gt * t) / width
        _store_heads(
            out + at, (gu - u * along) * scale, (gv - v * along) * scale, (gt - t * along) * scale,
            is_head, first, second, channel, is_pair, is_tail, TAIL,
        )  # fmt: skip
    return of_u, of_v, of_t


@triton.jit
def _join_norms(
    Packed, Out, OfQuery, OfKey, OfValue, QueryWeight, KeyWeight, Sums, Cos, Sin,
    table_b, table_s, num_sequences, groups, per_group, width, half, eps, tokens, each,
    TAIL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    COPIED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    REST: tl.constexpr = WIDTH if TAIL else 1
    program = tl.program_id(0)
    first, second, channel, is_pair, is_tail = _places(half, width, HALF, REST)
    group = (per_group + 2) * width
    qu = tl.zeros((HALF,), tl.float32)
    qv = tl.zeros((HALF,), tl.float32)
    ku = tl.zeros((HALF,), tl.float32)
    kv = tl.zeros((HALF,), tl.float32)
    qt = tl.zeros((REST,), tl.float32)
    kt = tl.zeros((REST,), tl.float32)
    for number in range(program * each, tl.minimum(program * each + each, tokens)):
        token = tl.cast(number, tl.int64)
        s = token // num_sequences
        b = token % num_sequences
        cos, sin = _load_angles(Cos, Sin, s * table_s + b * table_b, half, 1, HALF)
        packed = Packed + token * groups * group
        out = Out + token * groups * group
        heads = token * groups * width
        to_key = per_group * width
        qu, qv, qt = _norm_heads_backward(
            packed, out, OfQuery + heads * per_group, QueryWeight, cos, sin, qu, qv, qt, eps,
            per_group, group, groups * per_group, half, width, TAIL, COPIED, HALF, REST,
        )  # fmt: skip
        ku, kv, kt = _norm_heads_backward(
            packed + to_key, out + to_key, OfKey + heads, KeyWeight, cos, sin, ku, kv, kt, eps,
            1, group, groups, half, width, TAIL, COPIED, HALF, REST,
        )  # fmt: skip
        _move_heads(
            out + to_key + width, OfValue + heads, width, 1, groups, cos, sin, per_group + 2, half,
            width, True, False, True, HEADS, HALF, COPIED, WIDTH,
        )  # fmt: skip
    sums = Sums + program.to(tl.int64) * 2 * width
    tl.store(sums + first, qu, mask=is_pair)
    tl.store(sums + second, qv, mask=is_pair)
    tl.store(sums + width + first, ku, mask=is_pair)
    tl.store(sums + width + second, kv, mask=is_pair)
    if TAIL:
        tl.store(sums + channel, qt, mask=is_tail)
        tl.store(sums + width + channel, kt, mask=is_tail)
