"""Matrices of 8 bits: codes and scales of `low_precision`, to the bit."""

from __future__ import annotations

import pkgutil

import pytest
import torch
from torch import Tensor

from megatron.core import device, low_precision
from megatron.core.fusions.quantize import product, quantize, quantize_and_look, scaled_mm
from megatron.core.low_precision import E4M3, E5M2, Block, FloatFormat, Scaled
from tests.gpu.conftest import has_fp8
from tests.support import tolerances
from tests.unit.tensor_parallel.test_quantized_linear import IN, OUT, TOKENS, make

pytestmark = pytest.mark.skipif(
    not has_fp8(), reason="fp8 formats need a compute capability of 8.9 or higher"
)

BITS = {E4M3: 4, E5M2: 3}  # of a number of the format


@pytest.fixture(autouse=True)
def uses_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "multiplies_fp8", lambda where: True)


def numbers(where: str, to: FloatFormat, rows: int = 133, columns: int = 209) -> Tensor:
    """The interpreter does not round, so these have no more bits than the format."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-(2 ** BITS[to]) + 1, 2 ** BITS[to], (rows, columns), generator=generator)
    place = torch.arange(rows)[:, None] + torch.arange(columns)[None, :]
    return (codes * 2.0 ** (place // 61 - 3)).to(where, torch.bfloat16)


def same(ours: Scaled, expected: Scaled) -> None:
    assert ours.block == expected.block
    for a, b in ((ours.codes.float(), expected.codes.float()), (ours.scale, expected.scale)):
        torch.testing.assert_close(a, b, equal_nan=True, **tolerances.BITWISE)


@pytest.mark.parametrize("to", [E4M3, E5M2])
def test_one_scale_for_a_matrix(to: FloatFormat, where: str) -> None:
    x = numbers(where, to)
    same(quantize(x, to), low_precision.plain_quantize(x, to))
    for amax in (0.0, 1e-40, to.largest, to.largest * 1.01, 3.0):  # the last cuts off
        known = torch.tensor(amax, device=where)
        same(
            quantize(x, to, amax=known, margin=2),
            low_precision.plain_quantize(x, to, amax=known, margin=2),
        )


@pytest.mark.parametrize("block", [(1, 32), (1, 128), (32, 1), (128, 1), (128, 128)])
def test_a_scale_for_each_block(block: Block, where: str) -> None:
    x = numbers(where, E4M3)
    x[:, 130:] = 0
    same(quantize(x, E4M3, block), low_precision.plain_quantize(x, E4M3, block))


def test_what_is_not_finite_is_not_lost(where: str) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        x = numbers(where, E4M3)
        x[70, 3] = value
        ours, expected = (f(x, E4M3, (1, 32)) for f in (quantize, low_precision.plain_quantize))
        torch.testing.assert_close(ours.scale, expected.scale, equal_nan=True, **tolerances.BITWISE)
        scaled, amax = quantize_and_look(x, E4M3, torch.tensor(2.0, device=where), 0)
        nothing = torch.full_like(amax, torch.nan)
        torch.testing.assert_close([scaled.scale, 0 * amax], [nothing] * 2, equal_nan=True)


def test_the_largest_value_is_seen_on_the_way(where: str) -> None:
    x, known = numbers(where, E4M3), torch.tensor(2.0, device=where)
    scaled, amax = quantize_and_look(x, E4M3, known, 1)
    same(scaled, low_precision.plain_quantize(x, E4M3, amax=known, margin=1))
    torch.testing.assert_close(amax, x.abs().max().float(), **tolerances.BITWISE)


@pytest.mark.parametrize("to", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(133, 209), (128, 256), (0, 16)])
def test_one_kernel_writes_the_codes_of_both_orientations(
    to: FloatFormat, shape: tuple[int, int], where: str
) -> None:
    x = numbers(where, to, *shape)
    found = quantize(x, to, turns=True)
    same(found, low_precision.plain_quantize(x, to))
    turned = found.t()
    assert turned.codes.is_contiguous()
    torch.testing.assert_close(turned.codes.float(), found.codes.float().t(), **tolerances.BITWISE)
    known = torch.tensor(2.0, device=where)
    scaled, amax = quantize_and_look(x, to, known, 1, turns=True)
    same(scaled, low_precision.plain_quantize(x, to, amax=known, margin=1))
    torch.testing.assert_close(amax, low_precision.largest(x), **tolerances.BITWISE)


def test_a_layer_transposes_its_weight_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that quantizes an input or a gradient writes the transposed codes too."""
    kernel = "megatron.core.fusions.triton.quantize.transposed"
    transpose = pkgutil.resolve_name(kernel.replace(".transposed", ":transposed"))
    shapes = []

    def noted(codes: Tensor) -> Tensor:
        shapes.append(tuple(codes.shape))
        return transpose(codes)

    monkeypatch.setattr(kernel, noted)
    layer = make("tensorwise", torch.bfloat16).to(where)
    x = torch.randn(*TOKENS, IN, device=where).bfloat16().requires_grad_()
    y, _ = layer(x)
    y.backward(torch.randn_like(y))
    assert shapes == [(OUT, IN)]


def test_a_transposed_matrix_is_multiplied(where: str) -> None:
    x = numbers(where, E4M3, 133, 208)
    a, b = quantize(x, E4M3), quantize(x, E4M3)
    result = product(a.t(), b.t(), torch.bfloat16)
    expected = scaled_mm(a.t(), b.t(), torch.bfloat16, fast=False)
    torch.testing.assert_close(result, expected, **tolerances.BITWISE)
