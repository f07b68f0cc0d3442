"""Matmuls whose rows do not depend on each other: values of torch's, bits of a row alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.device import cpu_kernels
from megatron.core.fusions.small_linear import small_linear
from megatron.core.inference.paged_engine.sampler import log_probs_of
from tests.support import tolerances


@pytest.fixture(autouse=True)
def no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "take", lambda *_: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_has_the_values_of_torch_and_the_bits_of_a_row_alone(
    dtype: torch.dtype, has_bias: bool, where: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 100, device=where).to(dtype)
    weight = (torch.randn(130, 100, device=where) / 10).to(dtype)
    bias = torch.randn(130, device=where) if has_bias else None
    found = small_linear(x, weight, bias)
    assert found.shape == (2, 20, 130)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # A sum may be near 0, so that its own relative error says little.
    error = (found.double() - wanted).norm() / wanted.norm()
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(error, torch.zeros_like(error), atol=limit, rtol=0)
    rows = found.flatten(0, 1)
    for place in (0, 16, 32):  # the first rows of tiles: NumPy rounds by place, a GPU does not
        row = x.flatten(0, 1)[place : place + 1]
        for count in (1, 5):
            alone = small_linear(row.repeat(count, 1), weight, bias)
            torch.testing.assert_close(alone[0], rows[place], **tolerances.BITWISE)


def test_log_probs_of_a_row_have_the_bits_of_a_row_alone(where: str) -> None:
    logits = torch.randn(19, 150, device=where)
    tokens = torch.randint(0, 150, (19, 3), device=where)
    found = log_probs_of(logits.clone(), tokens)
    wanted = torch.log_softmax(logits.double(), -1).gather(-1, tokens)
    torch.testing.assert_close(found, wanted.float(), **tolerances.of(torch.float32))
    for place in (0, 16):
        alone = log_probs_of(logits[place : place + 1].clone(), tokens[place : place + 1])
        torch.testing.assert_close(alone[0], found[place], **tolerances.BITWISE)
