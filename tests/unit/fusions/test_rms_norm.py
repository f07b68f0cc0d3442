"""The kernel has the values and gradients of its plain form, and keeps less."""

from __future__ import annotations

import pytest
import torch

from megatron.core.fusions.rms_norm import norm_rows
from tests.support import kernel_references as references
from tests.support import tolerances

pytestmark = pytest.mark.usefixtures("each_form")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_the_plain_form(dtype: torch.dtype) -> None:
    results = []
    for function in (lambda x, w, eps: norm_rows(x, w, None, eps), references.rms_norm):
        torch.manual_seed(0)
        x = torch.randn(5, 3, 16, dtype=torch.float64).to(dtype).requires_grad_()
        weight = torch.randn(16, dtype=torch.float64).to(dtype).requires_grad_()
        out = function(x, weight, 1e-3)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append((out, x.grad, weight.grad))
    assert results[0][0].dtype == dtype
    torch.testing.assert_close(results[0], results[1], **tolerances.of(dtype))


def test_frozen_weights_and_inputs_are_left_out() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    norm_rows(x, weight, None, 1e-5).sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    norm_rows(x.requires_grad_(), weight.detach(), None, 1e-5).sum().backward()
    assert x.grad is not None


def test_backward_keeps_the_input_and_one_number_a_row() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    # Some torch frees the saved tensors with the output.
    y = norm_rows(x, torch.ones(8), None, 1e-5)
    sizes = [t.numel() for t in y.grad_fn.saved_tensors]
    assert sizes == [32, 8, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_of_another_width_is_an_error(dtype: torch.dtype) -> None:
    x, weight = torch.ones(2, 8, dtype=dtype), torch.ones(4, dtype=dtype)
    for norm in (
        lambda: norm_rows(x, weight, None, 1e-5),
        lambda: norm_rows(x, weight, weight, 1e-5),
    ):
        with pytest.raises(RuntimeError, match="size|shape"):
            norm()
