"""Attention over pages: rows of many requests, keys in splits of a fixed size.

A tile is 16 lines (heads of rows) of one request and one group of heads.  A program handles one
tile and one split of `_SPLIT` keys with an online softmax, so that few requests with long texts
fill a GPU; a second kernel combines the splits of each tile in their order.  Splits and blocks of
keys start at fixed positions and a tile always has 16 lines.  So a row does not depend on the other
requests, on chunks of its prompt, or on the number of splits.

Rows are assigned to tiles on the device, without a wait of the host: with R rows in a tile, request
i has tiles from first_row[i] // R + i on, which leaves room for all its rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LINES = 16  # the least that tl.dot multiplies
_SPLIT = 1024  # keys
_BUFFER_BYTES = 1 << 26  # of results of splits, at a time
_WARPS = 4
_FAR = 2**30  # beyond any key


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    indices: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    sink: Tensor | None,
) -> Tensor:
    """Attend as `fusions.paged_attention.paged_attention`; ``indices`` are those of its batch."""
    (num_rows, heads, width) = query.shape
    (_, page, groups, value_width) = values.shape
    first_row, num_keys, table = indices
    out = query.new_empty(num_rows, heads, value_width)
    if not num_rows:
        return out
    share = heads // groups
    share_block = min(_LINES, triton.next_power_of_2(share))
    parts = -(-share // share_block)
    rows = _LINES // share_block
    splits = -(-table.shape[1] * page // _SPLIT)
    value_block = max(16, triton.next_power_of_2(value_width))
    tiles = num_rows // rows + len(num_keys)
    tile_bytes = 4 * groups * parts * splits * _LINES * (value_block + 2)
    at_once = max(1, min(tiles, _BUFFER_BYTES // tile_bytes))
    shape = at_once, groups * parts, splits, _LINES
    sums = query.new_empty(*shape, value_block, dtype=torch.float32)
    totals = query.new_empty(2, *shape, dtype=torch.float32)  # largest score; sum of exponentials
    width_block = max(16, triton.next_power_of_2(width))
    common = {
        "ROWS": rows,
        "SHARE": share,
        "SHARE_BLOCK": share_block,
        "SPLIT": _SPLIT,
        "VALUE_BLOCK": value_block,
        "num_warps": _WARPS,
    }
    numbers = len(num_keys), heads, splits, _FAR if window is None else window, value_width
    for start in range(0, tiles, at_once):
        count = min(at_once, tiles - start)
        _attend[(count, groups * parts, splits)](
            query,
            keys,
            values,
            first_row,
            num_keys,
            table,
            sums,
            *totals,
            start,
            *numbers,
            table.shape[1],
            scale,
            softcap or 1.0,
            *query.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            width,
            PAGE=page,
            WIDTH_BLOCK=width_block,
            BLOCK=64 if width_block <= 128 else 32 if width_block <= 256 else 16,
            HAS_SOFTCAP=softcap is not None,
            IS_WIDE=torch.promote_types(query.dtype, keys.dtype) == torch.float32,
            **common,
        )
        _combine[(count, groups * parts)](
            sums,
            *totals,
            first_row,
            num_keys,
            sink,
            out,
            start,
            *numbers,
            **common,
        )
    return out


@triton.jit
def _tile(
    First,
    Keys,
    tile,
    num_segments,
    window,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_BLOCK: tl.constexpr,
):
    """Return segment, rows, heads and positions of a tile, and the range of keys that it sees."""
    low = tl.zeros((), tl.int64)
    high = low + num_segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(First + middle) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(First + low)
    end = tl.load(First + low + 1)
    first = begin + (tile - begin // ROWS - low) * ROWS  # row
    line = tl.arange(0, ROWS * SHARE_BLOCK)
    parts: tl.constexpr = tl.cdiv(SHARE, SHARE_BLOCK)
    row = first + line // SHARE_BLOCK
    head = line % SHARE_BLOCK
    head += tl.program_id(1) % parts * SHARE_BLOCK
    is_line = (row < end) & (head < SHARE)
    head += tl.program_id(1) // parts * SHARE
    before = tl.load(Keys + low) - end  # position of a row: before + row
    stop = tl.where(first < end, before + tl.minimum(first + ROWS, end), 0)
    start = tl.maximum(before + first - window, 0)
    return low, row, head, is_line, before + row, start, stop


@triton.jit
def _rows(base, at, channel, is_row, width):
    """Load the channels below ``width`` of the rows at offsets ``at``; 0 elsewhere."""
    mask = is_row[:, None] & (channel < width)[None, :]
    return tl.load(base + at[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _place(split, num_splits, LINES: tl.constexpr):
    """Return the places of this tile's lines in the results of a split."""
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return (tile * num_splits + split) * LINES + tl.arange(0, LINES)


@triton.jit
def _attend(
    Query,
    Keys,
    Values,
    First,
    NumKeys,
    Table,
    Sums,
    Tops,
    Totals,
    start_tile,
    num_segments,
    num_heads,
    num_splits,
    window,
    value_width,
    table_width,
    scale,
    softcap,
    query_row,
    query_head,
    key_page,
    key_token,
    key_head,
    value_page,
    value_token,
    value_head,
    width,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    LINES: tl.constexpr = ROWS * SHARE_BLOCK
    split = tl.program_id(2)
    tile = start_tile + tl.program_id(0)
    group = (tl.program_id(1) // tl.cdiv(SHARE, SHARE_BLOCK)).to(tl.int64)
    segment, row, head, is_line, position, start, stop = _tile(
        First, NumKeys, tile, num_segments, window, ROWS, SHARE, SHARE_BLOCK
    )
    channel = tl.arange(0, WIDTH_BLOCK)
    value_channel = tl.arange(0, VALUE_BLOCK)
    at = row.to(tl.int64) * query_row + head * query_head
    wanted: tl.constexpr = tl.float32 if IS_WIDE else Keys.dtype.element_ty
    q = _rows(Query, at, channel, is_line, width).to(wanted)
    tops = tl.full((LINES,), -1e30, tl.float32)
    totals = tl.zeros((LINES,), tl.float32)
    sums = tl.zeros((LINES, VALUE_BLOCK), tl.float32)
    table = Table + segment * table_width
    low = tl.maximum(start // BLOCK * BLOCK, split * SPLIT)
    for begin in range(low, tl.minimum(stop, split * SPLIT + SPLIT), BLOCK):
        key = begin + tl.arange(0, BLOCK)
        is_key = (key >= start) & (key < stop)
        page = tl.load(table + key // PAGE, mask=is_key, other=0).to(tl.int64)
        of_key = page * key_page + key % PAGE * key_token + group * key_head
        k = _rows(Keys, of_key, channel, is_key, width).to(wanted)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (1 - 2 / (1 + tl.exp(2 * scores / softcap)))
        ahead = position[:, None] - key[None, :]
        scores = tl.where(is_key[None, :] & (ahead >= 0) & (ahead <= window), scores, -float("inf"))
        top = tl.maximum(tops, tl.max(scores, 1))
        fading = tl.exp(tops - top)
        probs = tl.exp(scores - top[:, None])
        of_value = page * value_page + key % PAGE * value_token + group * value_head
        v = _rows(Values, of_value, value_channel, is_key, value_width).to(wanted)
        totals = totals * fading + tl.sum(probs, 1)
        sums = sums * fading[:, None] + tl.dot(probs.to(wanted), v, input_precision="ieee")
        tops = top
    place = _place(split, num_splits, LINES)
    tl.store(Tops + place, tops)
    tl.store(Totals + place, totals)
    tl.store(Sums + place[:, None] * VALUE_BLOCK + value_channel[None, :], sums)


@triton.jit
def _combine(
    Sums,
    Tops,
    Totals,
    First,
    NumKeys,
    Sink,
    Out,
    start_tile,
    num_segments,
    num_heads,
    num_splits,
    window,
    value_width,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    LINES: tl.constexpr = ROWS * SHARE_BLOCK
    tile = start_tile + tl.program_id(0)
    segment, row, head, is_line, position, start, stop = _tile(
        First, NumKeys, tile, num_segments, window, ROWS, SHARE, SHARE_BLOCK
    )
    value_channel = tl.arange(0, VALUE_BLOCK)
    tops = tl.full((LINES,), -1e30, tl.float32)
    totals = tl.zeros((LINES,), tl.float32)
    sums = tl.zeros((LINES, VALUE_BLOCK), tl.float32)
    for split in range(start // SPLIT, tl.cdiv(stop, SPLIT)):
        place = _place(split, num_splits, LINES)
        top = tl.load(Tops + place)
        highest = tl.maximum(tops, top)
        old = tl.exp(tops - highest)
        new = tl.exp(top - highest)
        totals = totals * old + tl.load(Totals + place) * new
        part = tl.load(Sums + place[:, None] * VALUE_BLOCK + value_channel[None, :])
        sums = sums * old[:, None] + part * new[:, None]
        tops = highest
    if Sink is not None:
        sink = tl.load(Sink + head, mask=is_line, other=0.0).to(tl.float32)
        highest = tl.maximum(tops, sink)
        old = tl.exp(tops - highest)
        totals = totals * old + tl.exp(sink - highest)
        sums = sums * old[:, None]
    totals = tl.where(is_line, totals, 1.0)
    at = (row.to(tl.int64) * num_heads + head) * value_width
    tl.store(
        Out + at[:, None] + value_channel[None, :],
        (sums / totals[:, None]).to(Out.dtype.element_ty),
        mask=is_line[:, None] & (value_channel < value_width)[None, :],
    )
