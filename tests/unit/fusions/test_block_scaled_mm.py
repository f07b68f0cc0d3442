"""fp8 GEMMs with a scale per block: the layouts of scales, and when the GEMM is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.fusions import quantize
from megatron.core.low_precision import E4M3, E5M2, Scaled
from tests.support import tolerances
from tests.support.host_gpu import gemm
from tests.unit.test_low_precision import draw

ROW = (1, 128)
SQUARE = (128, 128)
MX = (1, 32)
PRODUCTS = {
    "forward": (ROW, SQUARE, E4M3),
    "input gradient": (ROW, SQUARE, E5M2),
    "weight gradient": (ROW, ROW, E5M2),
    "mxfp8": (MX, MX, E4M3),
}


@pytest.fixture(autouse=True)
def has_gemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A GEMM that checks torch's contract; yields its calls."""
    calls: list[Any] = []

    def multiply(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return gemm.scaled_mm_v2(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm_v2", multiply)
    monkeypatch.setattr(device, "multiplies_fp8", lambda where: True)
    quantize._is_right.cache_clear()
    yield calls
    quantize._is_right.cache_clear()


def operands(name: str, m: int = 144, n: int = 256, k: int = 384) -> tuple[Scaled, Scaled]:
    left, right, to = PRODUCTS[name]
    if name == "weight gradient":  # the tokens are the rows of both
        a = quantize.quantize(draw(k, m), to, (128, 1))
        return a.t(), quantize.quantize(draw(k, n, seed=1), E4M3, (128, 1)).t()
    a = quantize.quantize(draw(m, k), to, left)
    return a, quantize.quantize(draw(n, k, seed=1), E4M3, right)


@pytest.mark.feature("Precision: blockwise fp8 and mxfp8 in torch's GEMM with block scales (GPU)")
@pytest.mark.parametrize("gives_out", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_blocks_is_that_of_the_values(
    name: str, gives_out: bool, has_gemm: list[Any]
) -> None:
    a, b = operands(name)
    out = torch.full((144, 256), 7.0) if gives_out else None
    found = quantize.product(a, b, torch.float32, out=out)
    assert len(has_gemm) == 2  # the trial and the product
    assert out is None or found.data_ptr() == out.data_ptr()
    expected = a.values(torch.float64) @ b.values(torch.float64).t()
    torch.testing.assert_close(found, expected.float(), **tolerances.of(torch.float32))
    quantize.product(a, b, torch.float32)
    assert len(has_gemm) == 3


def test_a_transposed_weight_has_square_blocks_too(has_gemm: list[Any]) -> None:
    a, weight = operands("forward")[0], quantize.quantize(draw(384, 256), E4M3, SQUARE)
    found = quantize.product(a, weight.t(), torch.float32)
    expected = a.values(torch.float64) @ weight.values(torch.float64)
    torch.testing.assert_close(found, expected.float(), **tolerances.of(torch.float32))
    assert len(has_gemm) == 2


def test_nan_stays_nan_in_mxfp8() -> None:
    a, b = draw(144, 384), draw(256, 384)
    a[3, 40] = torch.nan
    found = quantize.product(
        *(quantize.quantize(x, E4M3, MX) for x in (a, b)), torch.float32
    ).isnan()
    assert found[3].all()
    assert not found[4].any()


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("failure", [NotImplementedError, ValueError, AttributeError, None])
def test_a_gemm_that_fails_or_is_wrong_is_not_used(
    name: str,
    failure: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()

    def multiply(*args: Any, **options: Any) -> Tensor:
        if failure is not None:
            raise failure("no such GEMM\nin this release")
        return gemm.scaled_mm_v2(*args, **options).roll(1)

    monkeypatch.setattr(torch, "_scaled_mm_v2", multiply)
    a, b = operands(name)
    expected = quantize.dequantized_product(a, b, torch.float32)
    for _ in range(2):
        found = quantize.product(a, b, torch.float32)
        torch.testing.assert_close(found, expected, **tolerances.BITWISE)
    (said,) = (line for line in caplog.messages if "torch's GEMM is not used" in line)
    why = "its result is wrong" if failure is None else f"{failure.__name__}: no such GEMM"
    assert said.endswith(f"({why})")


@pytest.mark.parametrize("shape", [(0, 256, 384), (10, 256, 384), (144, 8, 384), (144, 256, 200)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_other_sizes_are_multiplied_as_values(
    name: str, shape: tuple[int, int, int], has_gemm: list[Any]
) -> None:
    a, b = operands(name, *shape)
    expected = quantize.dequantized_product(a, b, torch.float32)
    found = quantize.product(a, b, torch.float32)
    torch.testing.assert_close(found, expected, **tolerances.BITWISE)
    assert not has_gemm
