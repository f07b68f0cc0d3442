"""Keys and values in 8 bits: the kernels compute what the formula in torch computes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.core.device import cpu_kernels
from megatron.core.fusions.paged_attention import (
    SCALE_BYTES,
    PagedRule,
    decode,
    encode,
    paged_attention,
    store_rows,
)
from tests.support import tolerances
from tests.unit.fusions.conftest import kernels_off
from tests.unit.fusions.test_paged_attention import Pages, Sizes, batch_of, drawn

each_form = pytest.mark.usefixtures("each_form")
compiled_only = pytest.mark.skipif(
    not cpu_kernels.has("paged_attention", torch.int8), reason="not in the installed extension"
)


def rows(dtype: torch.dtype = torch.float32, width: int = 40) -> Tensor:
    """Rows of many magnitudes [30, 3, width], the view of a wider tensor."""
    source = torch.Generator().manual_seed(3)
    out = torch.randn(30, 3, width + 5, generator=source)
    out *= torch.logspace(-20, 20, 30)[:, None, None]
    out[4] = 0
    return out.to(dtype)[..., :width]


def stored(values: Tensor) -> Tensor:
    """Store the rows in reverse order of places; return them encoded, in their order."""
    cache = torch.zeros(10, 4, values.shape[1], values.shape[2] + SCALE_BYTES, dtype=torch.int8)
    at = torch.arange(len(values)).flip(0) + 3
    store_rows(cache, values, at)
    return cache.flatten(0, 1)[at]


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 36, 64])
def test_stored_rows_are_within_half_a_code(dtype: torch.dtype, width: int) -> None:
    values = rows(dtype, width)
    found = stored(values)
    assert torch.equal(found, encode(values))
    wide = values.float()
    error = (decode(found) - wide).abs()
    assert bool((error <= wide.abs().amax(-1, keepdim=True) / 253).all())
    assert not decode(found)[4].any()


@each_form
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_decodes_to_nan(bad: float) -> None:
    values = rows()
    values[7, 1, 39] = values[8, 2, 0] = bad
    found = decode(stored(values))
    is_bad = torch.zeros(30, 3, dtype=torch.bool)
    is_bad[7, 1] = is_bad[8, 2] = True
    assert torch.equal(found.isnan().all(-1), is_bad)
    assert torch.equal(found.isnan().any(-1), is_bad)


@compiled_only
def test_every_instruction_set_gives_the_same_codes() -> None:
    kernels = cpu_kernels.compiled()
    assert kernels is not None
    sets = kernels.instruction_sets()
    try:
        for name in sets:
            kernels.use(name)
            assert torch.equal(stored(rows()), encode(rows())), name
    finally:
        kernels.use(sets[0])


def caches(sizes: Sizes, k: Tensor, v: Tensor) -> tuple[Pages, Pages, list[int]]:
    """The same tokens in 8 bits, and their decoded values in float32; and their pages."""
    narrow = Pages(sizes)
    wide = Pages(sizes)
    shape = sizes.num_pages, sizes.page, sizes.groups
    narrow.keys, narrow.values = (
        torch.full((*shape, width + SCALE_BYTES), -1, dtype=torch.int8)  # the scale is NaN
        for width in (sizes.width, sizes.value_width)
    )
    pages = narrow.add(k, v)
    assert wide.add(decode(encode(k)), decode(encode(v))) == pages
    return narrow, wide, pages


SHAPES = {
    "2 heads share keys": Sizes(),
    "one group per head": Sizes(heads=3, groups=3, width=64, value_width=64),
    "8 heads share keys": Sizes(heads=8, groups=1, width=128, value_width=128),
    "wider keys": Sizes(heads=16, groups=1, width=72, value_width=40, page=7),
}


@compiled_only
@pytest.mark.parametrize("rule", [PagedRule(0.2), PagedRule(0.2, 3.0, 20)], ids=["all", "window"])
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_attention_reads_the_decoded_values(sizes: Sizes, rule: PagedRule) -> None:
    q, k, v = drawn(sizes, 150)
    narrow, wide, pages = caches(sizes, k, v)
    for num_rows, num_keys in ((1, 150), (1, 64), (150, 150)):
        batch = batch_of([(num_rows, num_keys, pages)])
        query = q[num_keys - num_rows : num_keys] / 4  # scores near 1, as the tolerance expects
        found = paged_attention(query, narrow.keys, narrow.values, batch, rule)
        wanted = paged_attention(query, wide.keys, wide.values, batch, rule)
        assert torch.equal(found, wanted)
        with kernels_off():
            plain = paged_attention(query, narrow.keys, narrow.values, batch, rule)
        torch.testing.assert_close(found, plain, **tolerances.of(torch.float32))


@compiled_only
def test_values_may_be_the_keys() -> None:
    sizes = Sizes(groups=1, width=24, value_width=24)
    q, k, _ = drawn(sizes, 30)
    narrow, wide, pages = caches(sizes, k, k)
    batch = batch_of([(30, 30, pages)])
    rule = PagedRule(0.2)
    found = paged_attention(q, narrow.keys, narrow.keys, batch, rule)
    assert torch.equal(found, paged_attention(q, wide.keys, wide.keys, batch, rule))
