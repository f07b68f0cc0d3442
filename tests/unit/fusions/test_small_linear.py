"""Linear layers for few rows: values, bits that do not depend on the number of rows, int8 error."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from megatron.core.device import cpu_kernels
from megatron.core.fusions.small_linear import GROUP, Weight, quantize_weight, small_linear
from megatron.core.low_precision import Scaled
from tests.support import tolerances
from tests.unit.fusions.conftest import kernels_off

FORMATS = ["float32", "bfloat16", "int8"]
compiled_only = pytest.mark.skipif(
    not cpu_kernels.has("small_linear", torch.int8), reason="not in the installed extension"
)


def weight_in(form: str, outputs: int, width: int) -> Weight:
    weight = torch.randn(outputs, width) / width**0.5
    if form == "int8":
        return quantize_weight(weight)
    return weight.to(getattr(torch, form))


def values_of(weight: Weight) -> torch.Tensor:
    return weight.values(torch.float32) if isinstance(weight, Scaled) else weight.float()


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("outputs", "width"), [(1, 1), (3, 15), (4, 16), (7, 130), (130, 257), (64, 768), (9, 1700)]
)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 19, 50])
def test_outputs_equal_those_of_the_dequantized_weight(form, outputs, width, rows):
    x, weight, bias = (
        torch.randn(rows, width) / width**0.5,  # results near 1, as the tolerance expects
        weight_in(form, outputs, width),
        torch.randn(outputs),
    )
    for term in (bias, None):
        wanted = F.linear(
            x.double(), values_of(weight).double(), None if term is None else term.double()
        )
        out = small_linear(x, weight, term)
        assert out.shape == (rows, outputs)
        torch.testing.assert_close(out, wanted.float(), **tolerances.of(torch.float32))


@pytest.mark.usefixtures("each_form")
def test_activations_in_bf16_and_more_dimensions_keep_their_form():
    x = torch.randn(3, 2, 40).bfloat16()
    weight = torch.randn(24, 40).bfloat16()
    out = small_linear(x, weight, torch.ones(24).bfloat16())
    assert (out.dtype, out.shape) == (torch.bfloat16, (3, 2, 24))
    wanted = (F.linear(x.double(), weight.double()) + 1).bfloat16()
    torch.testing.assert_close(out, wanted, **tolerances.of(torch.bfloat16))


@compiled_only
@pytest.mark.parametrize("form", FORMATS)
def test_the_bits_of_a_row_depend_on_nothing_but_its_inputs(form):
    generator = random.Random(0)
    for _ in range(20):
        # One, two or many tiles of rows, one or several blocks of columns and of outputs.
        outputs = generator.randint(1, 300)
        width = generator.choice([9, 48, 700, 1003, 2048])
        weight = weight_in(form, outputs, width)
        bias = torch.randn(outputs)
        x = torch.randn(generator.choice([2, 3, 5, 8, 13, 16, 19, 100, 400]), width)
        whole = small_linear(x, weight, bias)
        for _ in range(5):
            start = generator.randrange(len(x))
            stop = generator.randint(start + 1, len(x))
            assert torch.equal(small_linear(x[start:stop], weight, bias), whole[start:stop])


@compiled_only
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [5, 40])
def test_threads_do_not_change_bits(form, rows):
    x = torch.randn(rows, 700)
    weight = weight_in(form, 2000, 700)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(small_linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@compiled_only
@pytest.mark.parametrize("form", FORMATS)
def test_every_instruction_set_gives_the_same_values(form):
    x = torch.randn(29, 333) / 333**0.5  # results near 1, as the tolerance expects
    weight = weight_in(form, 50, 333)
    bias = torch.randn(50)
    kernels = cpu_kernels.compiled()
    assert kernels is not None
    with kernels_off():
        wanted = small_linear(x, weight, bias)
    sets = kernels.instruction_sets()
    try:
        for name in sets:
            kernels.use(name)
            whole = small_linear(x, weight, bias)
            torch.testing.assert_close(whole, wanted, **tolerances.of(torch.float32))
            rows = [small_linear(row, weight, bias) for row in x]
            assert torch.equal(torch.stack(rows), whole), name
    finally:
        kernels.use(sets[0])


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("form", FORMATS)
def test_nan_and_infinity_stay_in_their_rows(form):
    x = torch.randn(5, 40)
    weight = weight_in(form, 9, 40)
    clean = small_linear(x, weight)
    x[1, 3] = torch.nan
    x[4, 0] = torch.inf
    out = small_linear(x, weight)
    assert out[1].isnan().all()
    assert not out[4].isfinite().any()
    torch.testing.assert_close(out[[0, 2, 3]], clean[[0, 2, 3]])


def test_int8_rounds_to_half_a_step_of_the_largest_value_of_a_group():
    weight = torch.randn(10, 3 * GROUP + 5)
    weight[3, :GROUP] = 0
    weight[4, 200] = 50.0
    rounded = quantize_weight(weight)
    assert rounded.codes.dtype == torch.int8
    assert rounded.scale.shape == (10, 4)
    error = (rounded.values(torch.float32) - weight).abs()
    for g, part in enumerate(error.split(GROUP, 1)):
        assert (part <= rounded.scale[:, g : g + 1] * 0.5001).all()
    assert torch.equal(rounded.values(torch.float32)[3, :GROUP], torch.zeros(GROUP))
    # A large value costs its own group precision, not the row.
    assert error[4, :GROUP].max() < 0.02


def test_the_error_of_int8_outputs_is_below_a_hundredth():
    x = torch.randn(16, 768)
    weight = torch.randn(768, 768)
    exact = F.linear(x, weight)
    error = (small_linear(x, quantize_weight(weight)) - exact).norm() / exact.norm()
    assert error < 0.01
