"""Attention over pages: values, and bits that do not depend on batch, chunking and threads."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatron.core.device import cpu_kernels
from megatron.core.fusions.paged_attention import PagedBatch, PagedRule, paged_attention, store
from tests.support import tolerances
from tests.unit.fusions.conftest import kernels_off

each_form = pytest.mark.usefixtures("each_form")
compiled_only = pytest.mark.skipif(
    not cpu_kernels.has("paged_attention", torch.float32), reason="not in the installed extension"
)


@dataclass(frozen=True)
class Sizes:
    """Heads and pages of a cache; ``num_pages`` of them have one owner at most."""

    heads: int = 4
    groups: int = 2
    width: int = 16
    value_width: int = 16
    page: int = 16
    num_pages: int = 64


class Pages:
    """Caches full of NaN in which requests get pages in random order."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.sizes = sizes
        self.free = list(range(sizes.num_pages))
        random.Random(seed).shuffle(self.free)
        shape = sizes.num_pages, sizes.page, sizes.groups
        self.keys = torch.full((*shape, sizes.width), math.nan, dtype=dtype)
        self.values = torch.full((*shape, sizes.value_width), math.nan, dtype=dtype)

    def add(self, key: Tensor, value: Tensor) -> list[int]:
        """Store the tokens [t, g, d] of a request; return its pages."""
        page = self.sizes.page
        count = len(key)
        pages = [self.free.pop() for _ in range(-(-count // page))]
        at = torch.tensor([pages[t // page] * page + t % page for t in range(count)])
        store(self.keys, self.values, key, value, at)
        return pages


def batch_of(parts: list[tuple[int, int, list[int]]]) -> PagedBatch:
    """Make the batch of segments (number of rows, number of keys, pages)."""
    rows = torch.tensor([0] + [num_rows for num_rows, _, _ in parts]).cumsum(0).int()
    table = torch.full((len(parts), max(len(pages) for *_, pages in parts)), -1)
    for line, (*_, pages) in zip(table, parts, strict=True):
        line[: len(pages)] = torch.tensor(pages)
    return PagedBatch(rows, torch.tensor([keys for _, keys, _ in parts]).int(), table.int())


def drawn(sizes: Sizes, count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Sample query, key and value of ``count`` tokens of one request."""
    source = torch.Generator().manual_seed(seed)
    shapes = (
        (count, sizes.heads, sizes.width),
        (count, sizes.groups, sizes.width),
        (count, sizes.groups, sizes.value_width),
    )
    q, k, v = (torch.randn(shape, generator=source) for shape in shapes)
    return q, k, v


def expected(query: Tensor, key: Tensor, value: Tensor, rule: PagedRule) -> Tensor:
    """Attend all tokens of a request, one row and head at a time in float64."""
    query = query.double()
    key = key.double()
    value = value.double()
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    share = query.shape[1] // key.shape[1]
    for row, line in enumerate(query):
        first = 0 if rule.window is None else max(0, row - rule.window)
        for head, q in enumerate(line):
            scores = key[first : row + 1, head // share] @ q * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            if rule.sink is not None:
                scores = torch.cat((scores, rule.sink[head : head + 1].double()))
            probs = scores.softmax(0)[: row + 1 - first]
            out[row, head] = probs @ value[first : row + 1, head // share]
    return out


SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
RULES = {
    "plain": PagedRule(0.25),
    "softcap": PagedRule(0.5, softcap=2.0),
    "window": PagedRule(0.25, window=5),
    "own key only": PagedRule(0.25, window=0),
    "sink": PagedRule(0.25, sink=SINK),
    "all": PagedRule(0.5, softcap=3.0, window=20, sink=SINK),
}


@each_form
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("num_rows", [1, 5, 53])
def test_the_last_rows_of_a_request_see_the_keys_up_to_their_own(rule, num_rows):
    sizes = Sizes()
    q, k, v = drawn(sizes, 53)
    cache = Pages(sizes)
    batch = batch_of([(num_rows, 53, cache.add(k, v))])
    out = paged_attention(q[-num_rows:], cache.keys, cache.values, batch, rule)
    wanted = expected(q, k, v, rule)[-num_rows:].float()
    torch.testing.assert_close(out, wanted, **tolerances.of(torch.float32))


@each_form
def test_segments_of_a_step_do_not_see_each_other():
    sizes = Sizes()
    rule = PagedRule(0.25)
    cache = Pages(sizes)
    parts = []
    queries = []
    wanted = []
    for seed, (num_rows, num_keys) in enumerate([(1, 40), (7, 7), (0, 16), (3, 35)]):
        q, k, v = drawn(sizes, num_keys, seed)
        parts.append((num_rows, num_keys, cache.add(k, v)))
        queries.append(q[num_keys - num_rows :])
        wanted.append(expected(q, k, v, rule)[num_keys - num_rows :].float())
    out = paged_attention(torch.cat(queries), cache.keys, cache.values, batch_of(parts), rule)
    torch.testing.assert_close(out, torch.cat(wanted), **tolerances.of(torch.float32))


@each_form
def test_pages_before_the_window_may_belong_to_others():
    sizes = Sizes()
    rule = PagedRule(0.25, window=20)
    q, k, v = drawn(sizes, 100)
    cache = Pages(sizes)
    pages = cache.add(k, v)
    whole = batch_of([(3, 100, pages)])
    before = paged_attention(q[-3:], cache.keys, cache.values, whole, rule)
    given_back = (97 - 20) // sizes.page
    cache.keys[pages[:given_back]] = cache.values[pages[:given_back]] = math.nan
    table = whole.block_table.clone()
    table[:, :given_back] = 0
    after = paged_attention(
        q[-3:], cache.keys, cache.values, replace(whole, block_table=table), rule
    )
    assert torch.equal(before, after)


@each_form
def test_values_may_be_a_part_of_the_keys():
    sizes = Sizes(groups=1, width=24, value_width=24)
    rule = PagedRule(0.2)
    q, k, _ = drawn(sizes, 30)
    cache = Pages(sizes)
    pages = cache.add(k, k)
    out = paged_attention(q, cache.keys, cache.keys[..., :16], batch_of([(30, 30, pages)]), rule)
    wanted = expected(q, k, k[..., :16], rule).float()
    torch.testing.assert_close(out, wanted, **tolerances.of(torch.float32))


@each_form
def test_a_step_without_rows_has_no_output():
    cache = Pages(Sizes())
    batch = PagedBatch(*(torch.zeros(shape, dtype=torch.int32) for shape in (1, 0, (0, 1))))
    query = torch.empty(0, 4, 16)
    assert paged_attention(query, cache.keys, cache.values, batch, PagedRule(1)).shape == (0, 4, 16)


SHAPES = {
    "one group per head": Sizes(heads=3, groups=3),
    "8 heads share keys": Sizes(heads=8, groups=1, width=128, value_width=128),
    "5 heads share keys": Sizes(heads=10, groups=2, width=20, value_width=20),
    "width below a vector": Sizes(width=5, value_width=3),
    "wider keys": Sizes(heads=16, groups=1, width=72, value_width=40),
    "wide heads": Sizes(width=256, value_width=256),
    "large pages": Sizes(page=256, num_pages=3, width=64, value_width=64),
    "odd pages": Sizes(page=7, num_pages=100, width=33, value_width=17),
}


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_heads_and_pages_have_any_size(sizes, dtype):
    rule = PagedRule(sizes.width**-0.5)
    q, k, v = (x.to(dtype) for x in drawn(sizes, 150))
    cache = Pages(sizes, dtype)
    batch = batch_of([(150, 150, cache.add(k, v))])
    out = paged_attention(q, cache.keys, cache.values, batch, rule)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected(q, k, v, rule).to(dtype), **tolerances.of(dtype))


@each_form
def test_a_float32_query_reads_a_bf16_cache():
    sizes = Sizes()
    rule = PagedRule(0.25)
    q, k, v = drawn(sizes, 40)
    cache = Pages(sizes, torch.bfloat16)
    batch = batch_of([(2, 40, cache.add(k, v))])
    out = paged_attention(q[-2:], cache.keys, cache.values, batch, rule)
    wanted = expected(q, k.bfloat16(), v.bfloat16(), rule)[-2:].float()
    torch.testing.assert_close(out, wanted, **tolerances.of(torch.float32))


@each_form
def test_the_query_may_be_a_slice_of_a_larger_tensor():
    sizes = Sizes()
    rule = PagedRule(0.25)
    q, k, v = drawn(sizes, 40)
    cache = Pages(sizes)
    batch = batch_of([(40, 40, cache.add(k, v))])
    mixed = torch.cat((q, torch.randn(40, 4, 9)), -1)
    out = paged_attention(mixed[..., :16], cache.keys, cache.values, batch, rule)
    assert torch.equal(out, paged_attention(q, cache.keys, cache.values, batch, rule))


@compiled_only
@pytest.mark.parametrize("seed", range(30))
def test_bits_do_not_depend_on_batch_chunks_pages_or_threads(seed):
    """Alone row by row, and with other requests in random chunks: the same bits."""
    chance = random.Random(seed)
    groups = chance.choice([1, 2, 3])
    width, value_width = chance.choice([(16, 16), (64, 64), (40, 24), (5, 130)])
    heads = groups * chance.choice([1, 2, 5, 8])
    sizes = Sizes(heads, groups, width, value_width, page=chance.choice([16, 64, 5]), num_pages=200)
    window = chance.choice([None, 0, 30, 100])
    softcap = chance.choice([None, 5.0])
    sink = chance.choice([None, torch.randn(heads)])
    rule = PagedRule(width**-0.5, softcap, window, sink)
    dtype = chance.choice([torch.float32, torch.bfloat16])
    lengths = [chance.randint(1, 190) for _ in range(3)]
    texts = [tuple(x.to(dtype) for x in drawn(sizes, n, i)) for i, n in enumerate(lengths)]

    cache = Pages(sizes, dtype, seed)
    alone = []
    for q, k, v in texts:
        pages = cache.add(k, v)
        rows = [
            paged_attention(
                q[t : t + 1], cache.keys, cache.values, batch_of([(1, t + 1, pages)]), rule
            )
            for t in range(len(q))
        ]
        alone.append(torch.cat(rows))

    other = Pages(replace(sizes, page=32), dtype, seed + 1)
    where = [other.add(k, v) for _, k, v in texts]
    done = [0] * len(texts)
    before = torch.get_num_threads()
    found: list[list[Tensor]] = [[] for _ in texts]
    try:
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            torch.set_num_threads(chance.choice([1, 2, 3]))
            steps = [
                min(n - d, chance.choice([0, 1, 7, 64, 190]))
                for d, n in zip(done, lengths, strict=True)
            ]
            done = [d + step for d, step in zip(done, steps, strict=True)]
            query = torch.cat(
                [q[d - s : d] for (q, _, _), d, s in zip(texts, done, steps, strict=True)]
            )
            batch = batch_of(list(zip(steps, done, where, strict=True)))
            out = paged_attention(query, other.keys, other.values, batch, rule)
            for rows, part in zip(found, out.split(steps), strict=True):
                rows.append(part)
    finally:
        torch.set_num_threads(before)
    for rows, wanted in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(rows), wanted)


@compiled_only
def test_every_instruction_set_gives_the_same_values():
    sizes = Sizes(heads=6, groups=2, width=40, value_width=24)
    rule = PagedRule(0.2, 4.0, 70, torch.randn(6))
    q, k, v = drawn(sizes, 150)
    kernels = cpu_kernels.compiled()
    assert kernels is not None
    for dtype in (torch.float32, torch.bfloat16):
        cache = Pages(sizes, dtype)
        batch = batch_of([(150, 150, cache.add(k, v))])
        with kernels_off():
            wanted = paged_attention(q, cache.keys, cache.values, batch, rule)
        sets = kernels.instruction_sets()
        try:
            for name in sets:
                kernels.use(name)
                out = paged_attention(q, cache.keys, cache.values, batch, rule)
                torch.testing.assert_close(out, wanted, **tolerances.of(torch.float32))
        finally:
            kernels.use(sets[0])


@compiled_only
def test_infinite_and_nan_values_of_later_keys_do_not_reach_a_row():
    sizes = Sizes()
    rule = PagedRule(0.25)
    q, k, v = drawn(sizes, 60)
    clean = Pages(sizes)
    dirty = Pages(sizes)
    clean_batch = batch_of([(60, 60, clean.add(k, v))])
    wanted = paged_attention(q, clean.keys, clean.values, clean_batch, rule)
    k[41:] = math.nan
    v[33:] = math.inf
    dirty_batch = batch_of([(60, 60, dirty.add(k, v))])
    out = paged_attention(q, dirty.keys, dirty.values, dirty_batch, rule)
    assert torch.equal(out[:33], wanted[:33])
    assert not out[33:].isfinite().any()


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_width", [16, 12, 0])
def test_rows_are_stored_where_they_belong_and_nowhere_else(
    dtype: torch.dtype, value_width: int
) -> None:
    count = 37
    groups = 3
    width = 16
    source = torch.Generator().manual_seed(2)
    packed = torch.randn(count, groups, 2 * width + 7, generator=source).to(dtype)
    key = packed[..., 5 : 5 + width]  # parts of a projection: rows and heads have gaps
    value = packed[..., width : width + value_width]
    at = torch.randperm(8 * 16, generator=source)[:count]
    caches = [torch.full((8, 16, groups, w), 9.0, dtype=dtype) for w in (width, value_width)]
    store(caches[0], caches[1], key, value, at)
    for cache, rows in zip(caches, (key, value), strict=True):
        wanted = torch.full((8 * 16, *rows.shape[1:]), 9.0, dtype=dtype)
        for row, place in zip(rows, at.tolist(), strict=True):
            wanted[place] = row
        assert torch.equal(cache.flatten(0, 1), wanted)
