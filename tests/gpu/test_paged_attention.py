"""Attention over pages on a GPU: values of the plain form, rows independent of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core.device import cpu_kernels
from megatron.core.fusions.paged_attention import PagedBatch, PagedRule, paged_attention
from tests.support import tolerances
from tests.unit.fusions.test_paged_attention import Pages, Sizes, batch_of, drawn

Plain = Callable[[Callable[[], object]], object]
SIZES = {
    "a group per head": Sizes(heads=3, groups=3, width=20, value_width=20),
    "3 heads share keys": Sizes(heads=6, groups=2, width=16, value_width=16, page=5),
    "24 heads share wide keys": Sizes(heads=24, groups=1, width=40, value_width=24),
}


@pytest.fixture(autouse=True)
def no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "take", lambda *_: False)
    monkeypatch.setattr("megatron.core.fusions.triton.paged_attention._SPLIT", 64)


def step(
    sizes: Sizes, parts: list[tuple[int, int]], dtype: torch.dtype, where: str
) -> tuple[Tensor, Tensor, Tensor, PagedBatch]:
    """Return the tensors of a step of requests with (rows, keys)."""
    cache = Pages(sizes, dtype)
    segments = []
    queries = []
    for seed, (num_rows, num_keys) in enumerate(parts):
        q, k, v = (x.to(dtype) for x in drawn(sizes, num_keys, seed))
        segments.append((num_rows, num_keys, cache.add(k, v)))
        queries.append(q[num_keys - num_rows :])
    batch = batch_of(segments)
    on = {name: getattr(batch, name).to(where) for name in vars(batch)}
    tensors = (torch.cat(queries), cache.keys, cache.values)
    query, keys, values = (x.to(where) for x in tensors)
    return query, keys, values, PagedBatch(**on)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["plain", "window", "all"])
@pytest.mark.parametrize("name", SIZES)
def test_attention_over_pages(
    name: str, rule: str, dtype: torch.dtype, where: str, plain: Plain
) -> None:
    sizes = SIZES[name]
    sink = torch.randn(sizes.heads, device=where)
    how = {
        "plain": PagedRule(0.2),
        "window": PagedRule(0.2, window=30),
        "all": PagedRule(0.3, softcap=3.0, window=70, sink=sink),
    }[rule]
    inputs = step(sizes, [(1, 90), (7, 7), (0, 3), (9, 75), (1, 1)], dtype, where)
    query, keys, values, batch = inputs
    found = paged_attention(query, keys, values, batch, how)
    wanted = plain(lambda: paged_attention(query, keys, values, batch, how))
    torch.testing.assert_close(found, wanted, **tolerances.of(dtype))


def test_rows_do_not_depend_on_other_requests_or_on_chunks(where: str) -> None:
    sizes = SIZES["3 heads share keys"]
    rule = PagedRule(0.2)
    query, keys, values, batch = step(sizes, [(30, 130), (9, 40)], torch.float32, where)
    whole = paged_attention(query, keys, values, batch, rule)
    for row in (0, 4, 28):  # the first rows of tiles: NumPy rounds by place, a GPU does not
        count = torch.tensor([row + 101], dtype=torch.int32, device=where)
        table = batch.block_table[:1, : -(-(row + 101) // sizes.page)].contiguous()
        ends = torch.tensor([0, 1], dtype=torch.int32, device=where)
        single = replace(batch, first_row=ends, num_keys=count, block_table=table)
        alone = paged_attention(query[row : row + 1], keys, values, single, rule)
        torch.testing.assert_close(alone[0], whole[row], **tolerances.BITWISE)


def test_results_of_splits_are_buffered_in_parts(
    where: str, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.core.fusions.triton.paged_attention._BUFFER_BYTES", 40_000)
    rule = PagedRule(0.2)
    query, keys, values, batch = step(Sizes(), [(30, 130), (9, 40)], torch.float32, where)
    found = paged_attention(query, keys, values, batch, rule)
    wanted = plain(lambda: paged_attention(query, keys, values, batch, rule))
    torch.testing.assert_close(found, wanted, **tolerances.of(torch.float32))
