"""Attention of the generation engine: queries of a step against keys and values in pages.

``N`` rows (tokens of a step), ``S`` segments (rows of one request), ``n`` query and ``g`` key/value
heads, ``d`` width of a query and key head, ``dv`` of a value head.  A cache is [num_pages,
page_size, g, d]: token t of a request is at ``block_table[segment, t // page_size]``, offset
``t % page_size``.  Scores and softmax are float32.

A cache of dtype int8 is [num_pages, page_size, g, d + SCALE_BYTES]: int8 codes of a key or value,
followed by their float32 scale, the largest absolute value / 127.  So the bits of a row depend on
its values alone.  d is a multiple of 4, so that scales are aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.fusions import kernels

SCALE_BYTES = 4
_LARGEST = 127  # code
_LINES = 64  # heads times rows that share the keys which a thread has loaded


@dataclass(frozen=True)
class PagedBatch:
    """Segments of a step, int32: ``first_row`` [S + 1], ``num_keys`` [S], ``block_table`` [S, P].

    Segment i has the rows first_row[i] to first_row[i + 1], which are the last tokens of its
    num_keys[i] tokens in the cache.  Entries of ``block_table`` beyond the last token, and before
    the window of the segment's first row, are not read.
    """

    first_row: Tensor
    num_keys: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class PagedRule:
    """How scores become probabilities.

    ``scale`` multiplies scores.  ``softcap`` limits them: softcap * tanh(score / softcap).
    ``window``: number of visible keys before the query's own; None: all.  ``sink`` [n]: score of an
    extra key with value 0 that every query of a head sees.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sink: Tensor | None = None


def store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, at: Tensor) -> None:
    """Write key [N, g, d] and value [N, g, dv] into the caches, in the format of the caches.

    ``at`` [N], int64: page * page_size + offset, different for each row.
    """
    # Every layer of a step calls this function: one kernel instead of two operations of torch.
    if _can_copy(key, keys, value, values):
        pairs = ((key, keys), (value, values))
        layouts = ((x.shape[-1], *x.stride()[:2], *y.stride()[1:3]) for x, y in pairs)
        cpu_kernels.run(
            "store_rows",
            [key, keys, value, values, at],
            format=key.dtype,
            sizes=(key.shape[1], *chain.from_iterable(layouts)),
            count=len(key),
            width=key.shape[1] * key.shape[2],
        )
        return
    for cache, rows in ((keys, key), (values, value)):
        if cache.dtype == torch.int8 and rows.shape[-1]:  # width 0: the keys are the values
            store_rows(cache, rows, at)
            continue
        cache.flatten(0, 1).index_copy_(0, at, rows.to(cache.dtype))


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, rule: PagedRule
) -> Tensor:
    """Attend causally: query [N, n, d] -> [N, n, dv], contiguous, in the dtype of the query.

    A query sees the keys of its segment up to its own position.  With the kernel of a CPU the bits
    of a row depend on its query and these keys alone, and that of a GPU sums in an order that
    depends on them alone; plain torch promises neither.
    """
    if _has_kernel(query, keys, values, batch):
        return _run(query, keys, values, batch, rule)
    is_encoded = keys.dtype == torch.int8
    if not is_encoded and (fused := kernels.find("paged_attention", query, keys, values)):
        y: Tensor = fused.attend(
            query if query.stride(-1) == 1 else query.contiguous(),
            keys,
            values,
            (batch.first_row, batch.num_keys, batch.block_table),
            scale=rule.scale,
            softcap=rule.softcap,
            window=rule.window,
            sink=rule.sink,
        )
        return y
    if device.is_cuda(query.device) and len(query) == len(batch.num_keys):
        # Each segment has one row.  Copy all pages: the host reads no index, and need not wait.
        pages = batch.block_table.long()
        k, v = (_decoded(cache[pages].flatten(1, 2)) for cache in (keys, values))
        return _attend(query[:, None], k, v, batch.num_keys[:, None] - 1, rule)[:, 0]
    out = query.new_empty(*query.shape[:2], _width(values))
    first_rows = batch.first_row.tolist()
    num_keys = batch.num_keys.tolist()
    for i, total in enumerate(num_keys):
        rows = slice(first_rows[i], first_rows[i + 1])
        num_rows = rows.stop - rows.start
        if not num_rows:
            continue
        first = 0 if rule.window is None else max(0, total - num_rows - rule.window)
        k, v = (gather(cache, batch.block_table[i], first, total) for cache in (keys, values))
        own = torch.arange(len(k) - num_rows, len(k), device=k.device)
        out[rows] = _attend(query[None, rows], k[None], v[None], own[None], rule)[0]
    return out


def reads_host(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> bool:
    """Return whether `paged_attention` reads the numbers of ``batch`` on the host of a CPU."""
    return not device.is_cuda(query.device) and not _has_kernel(query, keys, values, batch)


def _can_copy(*tensors: Tensor) -> bool:
    return (
        cpu_kernels.take(*tensors)
        and cpu_kernels.has("store_rows", tensors[0].dtype)
        and all(t.stride(-1) == 1 for t in tensors)
    )


def _has_kernel(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch) -> bool:
    indices = (batch.first_row, batch.num_keys, batch.block_table)
    return (
        query.dtype in (torch.float32, torch.bfloat16)
        and cpu_kernels.take(query)
        and (cpu_kernels.take(keys, values) or (keys.is_cpu and keys.dtype == torch.int8))
        and cpu_kernels.has("paged_attention", keys.dtype)
        and keys.stride(-1) == values.stride(-1) == 1
        and all(t.dtype == torch.int32 and t.is_contiguous() for t in indices)
    )


def _run(query: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, rule: PagedRule) -> Tensor:
    num_rows, heads, width = query.shape
    groups = keys.shape[2]
    segments = len(batch.num_keys)
    q = query.float()
    q = q if q.stride(-1) == 1 else q.contiguous()
    value_width = _width(values)
    out = q.new_empty(num_rows, heads, value_width)
    rows_per_task = max(1, _LINES // (heads // groups))
    groups_per_task = -(-groups // torch.get_num_threads())
    num_tasks = -(-num_rows // rows_per_task) * -(-groups // groups_per_task)
    sizes = (num_rows, segments, batch.block_table.shape[1], heads, groups, width)
    strides = (*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3])
    caches = (value_width, keys.shape[1])
    window = -1 if rule.window is None else rule.window
    tensors = (batch.first_row, batch.num_keys, batch.block_table)
    cpu_kernels.run(
        "paged_attention",
        [q, keys, values, *tensors, None if rule.sink is None else rule.sink.float(), out],
        format=keys.dtype,
        sizes=(*sizes, *caches, *strides, window, rows_per_task, groups_per_task),
        numbers=(rule.scale, rule.softcap or 0.0),
        count=num_tasks,
        grain=1,
    )
    return out.to(query.dtype)


def gather(cache: Tensor, pages: Tensor, first: int, stop: int) -> Tensor:
    """Copy the tokens from ``first`` to ``stop`` of a request: [stop - first, g, d]."""
    size = cache.shape[1]
    start = first // size
    found = cache[pages[start : -(-stop // size)].long()].flatten(0, 1)
    return _decoded(found[first - start * size : stop - start * size])


def _decoded(rows: Tensor) -> Tensor:
    return decode(rows) if rows.dtype == torch.int8 else rows


def _width(cache: Tensor) -> int:
    """Return the width of the values in a cache."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def _attend(query: Tensor, key: Tensor, value: Tensor, own: Tensor, rule: PagedRule) -> Tensor:
    """Attend of rows at positions ``own`` [S, m] of the keys of their segments.

    query [S, m, n, d], key [S, t, g, d], value [S, t, g, dv] -> [S, m, n, dv].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    num_keys = key.shape[1]
    q = query.to(wide).unflatten(2, (key.shape[2], -1))  # [S, m, g, n/g, d]
    scores = torch.einsum("smgrd,stgd->sgrmt", q, key.to(wide)) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    ahead = own[:, :, None] - torch.arange(num_keys, device=key.device)
    hidden = ahead < 0
    if rule.window is not None:
        hidden |= ahead > rule.window
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    # Memory that nobody has written may be NaN.
    value = value.to(wide).masked_fill(hidden.all(1)[:, :, None, None], 0)
    if rule.sink is not None:
        sink = rule.sink.to(wide).view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat((scores, sink), -1)
    probs = torch.softmax(scores, -1)[..., :num_keys]
    return torch.einsum("sgrmt,stgd->smgrd", probs, value).flatten(2, 3).to(query.dtype)


def store_rows(cache: Tensor, rows: Tensor, at: Tensor) -> None:
    """Write ``rows`` [N, g, d] into ``cache`` at page * page_size + offset ``at`` [N], int64."""
    _, groups, width = rows.shape
    has_kernel = cpu_kernels.take(rows) and cpu_kernels.has("quantize_rows", rows.dtype)
    if not has_kernel or rows.stride(-1) != 1:
        cache.flatten(0, 1).index_copy_(0, at, encode(rows))
        return
    cpu_kernels.run(
        "quantize_rows",
        [rows, cache, at],
        format=rows.dtype,
        sizes=(groups, width, *rows.stride()[:2], *cache.stride()[1:3]),
        count=len(rows) * groups,
        width=width,
    )


def encode(rows: Tensor) -> Tensor:
    """Quantize rows [.., d] -> int8 [.., d + SCALE_BYTES].

    A row with NaN or infinity decodes to NaN.
    """
    wide = rows.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / _LARGEST)
    scale = scale.masked_fill(~scale.isfinite(), torch.nan)
    codes = (wide / scale).round().nan_to_num(0).to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], -1)


def decode(rows: Tensor) -> Tensor:
    """Return the values of encoded rows in float32: [.., d + SCALE_BYTES] -> [.., d]."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return rows[..., :-SCALE_BYTES].float() * scale
