"""Split a packed QKV projection and rotate queries and keys: one read and one write each way.

Plain torch copies the queries before it rotates them, and in backward concatenates the gradients:
with a quarter as many keys as queries, 40 values are moved where this moves 24.  Values are copied,
so the packed projection is not kept for backward.

In a packed projection [s, b, g, (r + 2) d], each of the g groups has r queries, a key and a value
of width d.  One program handles one token of one sequence.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from megatron.core.fusions.triton.launch import launch, power_of_2
from megatron.core.fusions.triton.rope import load_angles, move_heads

_PAIRS, _WARPS = 2048, 4

Parts = tuple[Tensor, Tensor, Tensor]  # queries [s, b, g r, d], keys and values [s, b, g, d]


def split_and_turn(packed: Tensor, width: int, cos: Tensor, sin: Tensor) -> Parts:
    """Return rotated queries and keys, and values, of ``packed``, which is contiguous.

    ``cos`` and ``sin`` are [s, 1 or b, 1, half the rotated width]; pairs are not interleaved.
    """
    s, b, groups, packed_width = packed.shape
    queries = groups * (packed_width // width - 2)
    query, key, value = (packed.new_empty(s, b, n, width) for n in (queries, groups, groups))
    _launch(packed, (query, key, value), cos, sin, 1)
    return query, key, value


def turn_and_join(parts: Parts, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the packed gradient of the gradients ``parts``, whose channels are contiguous."""
    query, key, _ = parts
    s, b, groups, width = key.shape
    packed = query.new_empty(s, b, groups, (query.shape[2] // groups + 2) * width)
    _launch(packed, parts, cos, sin, -1)
    return packed


def _launch(packed: Tensor, parts: Parts, cos: Tensor, sin: Tensor, sign: int) -> None:
    s, b, groups, packed_width = packed.shape
    if not packed.numel():
        return
    query, key, value = parts
    half, heads, width = cos.shape[-1], *query.shape[2:]
    numbers = (
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        *(0 if cos.shape[1] == 1 else half, half * cos.shape[1]),
        *(b, groups, packed_width // width - 2, width, half, sign),
        *_blocks(half, heads, width),
    )
    tensors = packed, *parts, cos.contiguous(), sin.contiguous()
    launch(_split, (s * b,), tensors, numbers, _WARPS)


@cache
def _blocks(half: int, heads: int, width: int) -> tuple[bool, int, int, int, int]:
    """Return whether channels are copied, and the blocks of rotated and of copied channels."""
    block = max(4, power_of_2(half))
    tail = power_of_2(width)
    heads = power_of_2(heads)
    rotated = max(1, min(_PAIRS // block, heads)), block
    copied = max(1, min(2 * _PAIRS // tail, heads)), tail
    return 2 * half < width, *rotated, *copied


@triton.jit
def _split(
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
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // num_sequences, token % num_sequences
    cos, sin = load_angles(Cos, Sin, s * table_s + b * table_b, half, SIGN, HALF)
    packed = Packed + token * groups * (per_group + 2) * width
    query, key = Query + s * query_s + b * query_b, Key + s * key_s + b * key_b
    value = Value + s * value_s + b * value_b
    at_key = packed + per_group * width
    _move(
        packed, query, query_n, per_group, groups * per_group, cos, sin, per_group, half, width,
        SIGN, True, COPIES, HEADS, HALF, COPIED, WIDTH,
    )  # fmt: skip
    _move(
        at_key, key, key_n, 1, groups, cos, sin, per_group, half, width,
        SIGN, True, COPIES, HEADS, HALF, COPIED, WIDTH,
    )  # fmt: skip
    _move(
        at_key + width, value, value_n, 1, groups, cos, sin, per_group, half, width,
        SIGN, False, True, HEADS, HALF, COPIED, WIDTH,
    )  # fmt: skip


@triton.jit
def _move(
    packed,
    part,
    stride,
    per_group,
    num_heads,
    cos,
    sin,
    queries,
    half,
    width,
    SIGN: tl.constexpr,
    TURNS: tl.constexpr,
    COPIES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    COPIED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Move queries, keys or values of a token out of the packed projection, or back (SIGN -1)."""
    group, each = (queries + 2) * width, per_group * stride
    if SIGN == 1:
        move_heads(
            packed, width, group, part, stride, each, per_group, num_heads, cos, sin, half, width,
            TURNS, COPIES, HEADS, HALF, COPIED, WIDTH,
        )  # fmt: skip
    else:
        move_heads(
            part, stride, each, packed, width, group, per_group, num_heads, cos, sin, half, width,
            TURNS, COPIES, HEADS, HALF, COPIED, WIDTH,
        )  # fmt: skip
