"""Numbers of 8 and 4 bits: within half a unit of the format, and products of such matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import device, low_precision
from megatron.core.fusions.quantize import product, quantize, scaled_mm
from megatron.core.low_precision import (
    E2M1,
    E4M3,
    E5M2,
    Block,
    FloatFormat,
    Scaled,
    power_of_two,
    rotated,
)
from tests.support import tolerances

FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
BLOCKS: dict[str, Block | None] = {"whole": None, "rows": (1, 32), "square": (16, 16)}


def draw(*shape: int, seed: int = 0, decades: float = 3) -> Tensor:
    """Normal numbers, scaled over so many powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    size = (torch.rand(shape, generator=generator) - 0.5) * decades
    return torch.randn(shape, generator=generator) * 10**size


def error_bound(x: Tensor, to: FloatFormat, block: Block | None) -> Tensor:
    """How far a value may be from its code's: half a unit in its last place.

    That is 2^-4 of a number of e4m3 (three bits behind the leading one), 2^-3 and 2^-2 of the
    others; for the smallest, half of what lies between them, in units of the scale.  A scale of
    nvfp4 is a number of e4m3: rounded down by up to 2^-4, it cuts the largest value off by that.
    """
    half, smallest, cut = {
        E4M3: (2.0**-4, 2.0**-10, 0.0),
        E5M2: (2.0**-3, 2.0**-17, 0.0),
        E2M1: (2.0**-2, 2.0**-2, 2.0**-4),
    }[to]
    scale = quantize(x, to, block).scale
    ones = torch.full(x.shape, 1.0).to(torch.float8_e4m3fn)
    scales = Scaled(ones, scale, block).values(torch.float64)
    return torch.maximum((half + cut) * x.abs().double(), smallest * scales)


@pytest.mark.parametrize("shape", [(64, 96), (50, 70), (1, 1)])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_value_is_rounded_by_half_a_unit(name: str, block: str, shape: tuple[int, int]) -> None:
    to, x = FORMATS[name], draw(*shape)
    scaled = quantize(x, to, BLOCKS[block])
    error = (scaled.values(torch.float64) - x.double()).abs()
    assert (error <= error_bound(x, to, BLOCKS[block])).all()
    assert scaled.codes.float().abs().max() <= to.largest
    wide = scaled.values(torch.float32)
    assert torch.equal(scaled.t().values(torch.float32), wide.t())
    assert torch.equal(scaled.values(torch.bfloat16).float(), wide)  # bf16 holds it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_as_fp32_is(dtype: torch.dtype) -> None:
    x = draw(32, 32).to(dtype)
    for to in FORMATS.values():
        have, want = quantize(x, to, (1, 16)), quantize(x.float(), to, (1, 16))
        assert torch.equal(have.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(have.scale, want.scale)


def test_a_scale_is_the_smallest_power_of_two_that_fits() -> None:
    amax = torch.tensor([448.0, 448.1, 224.0, 224.1, 1.0, 3e-39, 0.0])
    scale = power_of_two(amax, 448.0)
    assert scale[:5].tolist() == [1.0, 2.0, 0.5, 1.0, 2.0**-8]
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert power_of_two(amax, 448.0, 2)[:2].tolist() == [4.0, 8.0]
    assert power_of_two(torch.tensor([torch.inf, torch.nan]), 448.0).isnan().all()


def test_a_power_of_two_changes_no_value_that_is_not_tiny() -> None:
    """So the largest value of a matrix, and with it the layout, decides next to nothing."""
    x = draw(32, 32, decades=1)
    x[x.abs() < 2.0**-8 * x.abs().max()] = 0
    whole = quantize(x, E4M3).values(torch.float32)
    for power in (2, 8, 32):  # 448 is 2^8.8 and 2^-6 the smallest normal number
        above = quantize(x, E4M3, amax=x.abs().max() * power).values(torch.float32)
        torch.testing.assert_close(above, whole, **tolerances.BITWISE)


def test_what_lies_above_the_range_becomes_the_largest_number() -> None:
    scaled = quantize(torch.tensor([[1.0, 100.0]]), E4M3, amax=torch.tensor(1.0))
    assert scaled.values(torch.float32).tolist() == [[1.0, 1.75]]  # 448 x 2^-8


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_is_seen(name: str, bad: float) -> None:
    x = draw(4, 64)
    x[1, 3] = bad
    assert quantize(x, FORMATS[name], (1, 16)).values(torch.float32)[1, :16].isnan().all()
    assert quantize(x, FORMATS[name]).values(torch.float32).isnan().all()


@pytest.mark.parametrize("left", ["e4m3", "e5m2"])
@pytest.mark.parametrize("inner", [64, 40])
def test_torchs_own_product_is_that_of_the_dequantized(left: str, inner: int) -> None:
    a, b = draw(24, inner, decades=1), draw(16, inner, seed=1, decades=1)
    scaled = quantize(a, FORMATS[left]), quantize(b, E4M3)
    torch.testing.assert_close(
        scaled_mm(*scaled, torch.float32, fast=False),
        product(*scaled, torch.float32),
        **tolerances.of(torch.float32),
    )
    exact = scaled[0].values(torch.float64) @ scaled[1].values(torch.float64).t()
    torch.testing.assert_close(product(*scaled, torch.float64), exact, **tolerances.BITWISE)


@pytest.mark.parametrize("tokens", [0, 5, 32])
def test_a_product_may_have_any_number_of_rows(tokens: int) -> None:
    a, b = quantize(torch.ones(tokens, 16), E4M3), quantize(torch.ones(8, 16), E4M3)
    assert product(a, b, torch.float32).tolist() == [[16.0] * 8] * tokens
    blocks = quantize(torch.ones(tokens, 16), E4M3, (32, 1)).t()
    assert product(blocks, blocks, torch.float32).tolist() == [[float(tokens)] * 16] * 16


@pytest.mark.parametrize("gives_out", [False, True])
@pytest.mark.parametrize("columns", [1, 20, 32])
def test_a_gpu_gets_sizes_in_multiples_of_16(
    monkeypatch: pytest.MonkeyPatch, columns: int, gives_out: bool
) -> None:
    def on_a_gpu(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        assert all(size % 16 == 0 for size in (left.shape[1], *right.shape))
        assert left.stride(1) == right.stride(0) == 1
        return multiply(left, right, **options)

    multiply = torch._scaled_mm
    a, b = (quantize(torch.randn(rows, 40), E4M3) for rows in (7, columns))
    monkeypatch.setattr(torch, "_scaled_mm", on_a_gpu)
    with device.simulate_device("cuda", without_memory=False):
        out = torch.full((7, columns), 3.0) if gives_out else None
        found = scaled_mm(a, b, torch.float32, fast=False, out=out)
    assert out is None or found is out
    torch.testing.assert_close(found, a.values(torch.float32) @ b.values(torch.float32).t())


def test_4_bits_have_15_numbers() -> None:
    want = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    x = torch.tensor([[0.2, 0.3, 0.8, 1.7, 2.4, 2.6, 4.9, 5.1, 6, 0.25, 0.75, 2.5, 3.5, 5, -5.2]])
    near = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 6, 0, 1, 2, 4, 4, -6]
    scaled = quantize(x, E2M1, (1, 16))
    assert scaled.scale.tolist() == [[1.0]]
    assert scaled.values(torch.float32).tolist() == [near]
    many = quantize(draw(64, 64), E2M1, (1, 16), at_random=True).codes.float().abs()
    assert set(many.unique().tolist()) == set(want)


def test_rounding_at_random_is_right_on_average() -> None:
    for value in (0.1, 0.6, 1.9, -2.2, 3.7, -5.5):
        x = torch.full((1, 2**14), value)
        x[:, 0] = 6  # makes the scale 1
        rounded = quantize(x, E2M1, (1, 2**14), at_random=True).values(torch.float64)[:, 1:]
        # Four times the deviation of a mean of 2^14 numbers that lie at most 2 apart.
        assert abs(rounded.mean() - value) < 4 * (2 / 2) / 2**7
        assert len(rounded.unique()) == 2
    x = draw(16, 64)
    again = quantize(x, E2M1, (1, 16), at_random=True), quantize(x, E2M1, (1, 16), at_random=True)
    assert torch.equal(again[0].codes.view(torch.uint8), again[1].codes.view(torch.uint8))


@pytest.mark.parametrize("tokens", [0, 7, 48])
def test_mixing_tokens_leaves_the_product_over_them(tokens: int) -> None:
    a, b = draw(tokens, 8).double(), draw(tokens, 6, seed=1).double()
    have = rotated(a).t() @ rotated(b)
    scale = float(a.abs().max() * b.abs().max()) if tokens else 1.0
    torch.testing.assert_close(have / scale, (a.t() @ b) / scale, **tolerances.of(torch.float64))
    outlier = torch.zeros(low_precision.HADAMARD, 1).index_fill_(0, torch.tensor([3]), 8.0)
    assert rotated(outlier).abs().unique().tolist() == [2.0]
