"""Split a packed QKV projection, normalise queries and keys by RMSNorm per head, and rotate them.

One read and one write forward.  Separate kernels copy the queries, then read and write queries and
keys for the norm and again for the rotation: three times.  Backward reads the projection and the
gradients once and writes the packed gradient once; it computes the norms' statistics again.

In a packed projection [s, b, g, (r + 2) d], each of the g groups has r queries, a key and a value
of width d.  Forward, one program handles one token of one sequence.  Backward, each of a fixed
number of programs handles a range of tokens and sums the gradients of the weights; these sums are
then added: the order is fixed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.rope import load_angles

_PAIRS = 2048
_WARPS = 4
_PROGRAMS = 1056  # in backward: eight for each of the 132 processors of an H100

Parts = tuple[Tensor, Tensor, Tensor]  # queries [s, b, g r, d], keys and values [s, b, g, d]
Angles = tuple[Tensor, Tensor]  # cos and sin [s, 1 or b, 1, rotated / 2]
Weights = tuple[Tensor, Tensor]  # of the norms of queries and keys: [d]


def split_and_norm(packed: Tensor, width: int, weights: Weights, eps: float, at: Angles) -> Parts:
    """Return normalised and rotated queries and keys, and values, of ``packed`` (contiguous)."""
    s, b, groups, packed_width = packed.shape
    queries = groups * (packed_width // width - 2)
    query, key, value = (packed.new_empty(s, b, n, width) for n in (queries, groups, groups))
    if packed.numel():
        _forward[(s * b,)](
            *(packed, query, key, value, *weights, *_angles(at), eps),
            *_sizes(packed, width, at),
            **_shape(queries, width, at),
        )
    return query, key, value


def join_gradients(
    packed: Tensor, grads: Parts, weights: Weights, eps: float, at: Angles
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``packed`` and of both weights, of contiguous ``grads``."""
    width = grads[0].shape[-1]
    tokens = packed.shape[0] * packed.shape[1]
    programs = max(1, min(tokens, _PROGRAMS))
    out = torch.empty_like(packed)
    sums = packed.new_empty(programs, 2, width, dtype=torch.float32)
    _backward[(programs,)](
        *(packed, out, *grads, *weights, sums, *_angles(at), eps),
        *_sizes(packed, width, at),
        tokens,
        triton.cdiv(tokens, programs),
        **_shape(grads[0].shape[2], width, at),
    )
    of_query, of_key = sums.sum(0).to(weights[0].dtype)
    return out, of_query, of_key


def _angles(at: Angles) -> tuple[Tensor, Tensor]:
    return at[0].contiguous(), at[1].contiguous()


def _sizes(packed: Tensor, width: int, at: Angles) -> tuple[int, ...]:
    _, b, groups, packed_width = packed.shape
    half = at[0].shape[-1]
    rows = at[0].shape[1]
    table = (0 if rows == 1 else half, half * rows)
    return (*table, b, groups, packed_width // width - 2, width, half)


def _shape(queries: int, width: int, at: Angles) -> dict[str, Any]:
    half = at[0].shape[-1]
    tail = triton.next_power_of_2(width)
    return {
        "TAIL": 2 * half < width,  # the channels after the rotated ones
        "HEADS": max(1, min(2 * _PAIRS // tail, triton.next_power_of_2(queries))),
        "HALF": max(4, triton.next_power_of_2(half)),
        "REST": tail if 2 * half < width else 1,
        "WIDTH": tail,
        "num_warps": _WARPS,
    }


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
    packed, part, Weight, cos, sin, eps, per_group, group, num_heads, half, width,
    TAIL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the heads of a token."""
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
            part + n * width, u * cos - v * sin, v * cos + u * sin, t,
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
def _copy_heads(
    From, from_head, To, to_head, num_heads, width, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    channel = tl.arange(0, WIDTH)[None, :]
    for begin in range(0, num_heads, HEADS):
        n = (begin + tl.arange(0, HEADS))[:, None]
        inside = (n < num_heads) & (channel < width)
        x = tl.load(From + n * from_head + channel, mask=inside)
        tl.store(To + n * to_head + channel, x, mask=inside)


@triton.jit
def _forward(
    Packed, Query, Key, Value, QueryWeight, KeyWeight, Cos, Sin, eps,
    table_b, table_s, num_sequences, groups, per_group, width, half,
    TAIL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s = token // num_sequences
    b = token % num_sequences
    cos, sin = load_angles(Cos, Sin, s * table_s + b * table_b, half, 1, HALF)
    group = (per_group + 2) * width
    packed = Packed + token * groups * group
    heads = token * groups * width
    at_key = packed + per_group * width
    _norm_heads(
        packed, Query + heads * per_group, QueryWeight, cos, sin, eps,
        per_group, group, groups * per_group, half, width, TAIL, HEADS, HALF, REST,
    )  # fmt: skip
    _norm_heads(
        at_key, Key + heads, KeyWeight, cos, sin, eps,
        1, group, groups, half, width, TAIL, HEADS, HALF, REST,
    )  # fmt: skip
    _copy_heads(at_key + width, group, Value + heads, width, groups, width, HEADS, WIDTH)


@triton.jit
def _backward(
    Packed, Out, OfQuery, OfKey, OfValue, QueryWeight, KeyWeight, Sums, Cos, Sin, eps,
    table_b, table_s, num_sequences, groups, per_group, width, half, tokens, each,
    TAIL: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
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
        cos, sin = load_angles(Cos, Sin, s * table_s + b * table_b, half, 1, HALF)
        packed = Packed + token * groups * group
        out = Out + token * groups * group
        heads = token * groups * width
        to_key = per_group * width
        qu, qv, qt = _norm_heads_backward(
            packed, out, OfQuery + heads * per_group, QueryWeight, cos, sin, qu, qv, qt, eps,
            per_group, group, groups * per_group, half, width, TAIL, HEADS, HALF, REST,
        )  # fmt: skip
        ku, kv, kt = _norm_heads_backward(
            packed + to_key, out + to_key, OfKey + heads, KeyWeight, cos, sin, ku, kv, kt, eps,
            1, group, groups, half, width, TAIL, HEADS, HALF, REST,
        )  # fmt: skip
        _copy_heads(
            OfValue + heads, width, out + to_key + width, group, groups, width, HEADS, WIDTH
        )
    sums = Sums + program.to(tl.int64) * 2 * width
    tl.store(sums + first, qu, mask=is_pair)
    tl.store(sums + second, qv, mask=is_pair)
    tl.store(sums + width + first, ku, mask=is_pair)
    tl.store(sums + width + second, kv, mask=is_pair)
    if TAIL:
        tl.store(sums + channel, qt, mask=is_tail)
        tl.store(sums + width + channel, kt, mask=is_tail)
