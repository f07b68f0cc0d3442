"""Output layer and loss in one step: values and gradients of the two-step path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.errors import DataError
from megatron.core.fusions import linear_cross_entropy as fusion
from megatron.core.tensor_parallel.fused_linear_cross_entropy import linear_cross_entropy
from tests.support import kernel_references as references
from tests.support import tolerances
from tests.support.one_process import one_rank

pytestmark = pytest.mark.usefixtures("each_form")


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(9, 8, dtype=torch.float64)
    weight = torch.randn(16, 8, dtype=torch.float64)
    target = torch.tensor([0, 12, 3, -100, 5, 5, 7, 11, 2])
    scale = torch.rand(9)
    scale[4] = 0
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target, scale


@pytest.fixture(autouse=True)
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_ELEMENTS_CPU", 64)
    monkeypatch.setattr(fusion, "_ROWS_WITHOUT_GRADIENT", 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_the_plain_path(dtype: torch.dtype) -> None:
    x, weight, target, scale = inputs(dtype)
    loss = linear_cross_entropy(x, weight, target, group=one_rank(), num_columns=13)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    (loss * scale).sum().backward()
    plain_x, plain_w, _, _ = inputs(dtype)
    expected = references.linear_cross_entropy(plain_x, plain_w, target, vocab_size=13)
    (expected * scale).sum().backward()
    torch.testing.assert_close(loss, expected, **tolerances.of(dtype))
    for grad, plain in ((x.grad, plain_x.grad), (weight.grad, plain_w.grad)):
        assert grad is not None
        torch.testing.assert_close(grad, plain, **tolerances.of(dtype))
        assert (grad[13:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_chunk_at_a_time_gives_the_same(dtype: torch.dtype, cap: float | None) -> None:
    x, weight, target, scale = inputs(dtype)
    bias = torch.linspace(-1, 1, 16, dtype=dtype).requires_grad_()
    loss = linear_cross_entropy(
        x, weight, target, group=one_rank(), num_columns=13, bias=bias, cap=cap, chunk_size=4
    )
    saved = loss.grad_fn.saved_tensors
    assert not [t for t in saved if t.numel() >= 9 * 13 and t is not weight]
    (loss * scale).sum().backward()
    plain_x, plain_w, _, _ = inputs(dtype)
    plain_bias = bias.detach().clone().requires_grad_()
    logits = torch.nn.functional.linear(plain_x, plain_w, plain_bias)[:, :13]
    wide = logits if cap is None else cap * torch.tanh(logits / cap)
    wide = wide.to(torch.promote_types(dtype, torch.float32))
    expected = torch.nn.functional.cross_entropy(wide, target, reduction="none")
    (expected * scale).sum().backward()
    torch.testing.assert_close(loss, expected, **tolerances.of(dtype))
    for param, plain in ((x, plain_x), (weight, plain_w), (bias, plain_bias)):
        torch.testing.assert_close(param.grad, plain.grad, **tolerances.of(dtype))


def test_chunks_are_added_up_before_they_become_16_bits() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(512, 8).bfloat16(), torch.randint(16, (512,))
    found = []
    for dtype, chunk_size in ((torch.float64, 0), (torch.bfloat16, 0), (torch.bfloat16, 8)):
        weight: Any = torch.ones(16, 8, dtype=dtype, requires_grad=True)
        weight.main_grad, weight.overwrite_main_grad = torch.full_like(weight.data, 9), True
        loss = linear_cross_entropy(
            x.to(dtype),
            weight,
            target,
            group=one_rank(),
            num_columns=16,
            is_own=True,
            chunk_size=chunk_size,
        )
        loss.sum().backward()
        assert weight.grad_added_to_main_grad
        found.append(weight.main_grad.double())
    errors = [(grad - found[0]).norm() for grad in found[1:]]
    assert errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("kind", [torch.nan, -torch.inf])
def test_columns_without_a_number_are_summed_as_torch_does(kind: float) -> None:
    x, weight = torch.ones(2, 1), torch.full((5, 1), kind)
    target = torch.tensor([-1, 2])
    own = fusion._Rows(target, fusion.VocabularyPart(one_rank(), 5), (2, 5))
    log_sum, _ = fusion._own_sums(x @ weight.t(), own, slice(None))
    torch.testing.assert_close(log_sum, torch.full((2,), kind), equal_nan=True)


def test_without_gradients_the_loss_is_the_same() -> None:
    x, weight, target, _ = inputs(torch.float32)
    loss = linear_cross_entropy(x, weight, target, group=one_rank(), num_columns=13)
    with torch.no_grad():
        alone = linear_cross_entropy(x, weight, target, group=one_rank(), num_columns=13)
    torch.testing.assert_close(alone, loss, **tolerances.of(torch.float32))


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight, target, _ = inputs(torch.float32)
    weight.requires_grad_(False)
    linear_cross_entropy(x, weight, target, group=one_rank(), num_columns=16).sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    x, bias = x.detach().requires_grad_(), torch.zeros(16, requires_grad=True)
    linear_cross_entropy(
        x, weight, target, group=one_rank(), num_columns=16, bias=bias, chunk_size=4
    ).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    assert bias.grad is not None


def test_a_hopeless_target_has_a_finite_loss() -> None:
    x = torch.tensor([[100.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]])
    loss = linear_cross_entropy(x, weight, torch.tensor([1]), group=one_rank(), num_columns=2)
    assert loss.tolist() == [200.0]


def test_fp16_keeps_small_probabilities() -> None:
    x = torch.tensor([[17.0]], dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.tensor([0]), group=one_rank(), num_columns=2)
    (loss * 4096).sum().backward()
    assert weight.grad is not None
    expected = 4096 * 17 * torch.sigmoid(torch.tensor(-17.0))
    torch.testing.assert_close(weight.grad[1].float(), expected[None], rtol=0.05, atol=0)


def test_memory_holds_the_logits_once_in_the_compute_dtype() -> None:
    x, weight, target, _ = inputs(torch.bfloat16)
    loss = linear_cross_entropy(x, weight, target, group=one_rank(), num_columns=13)
    saved = [t for t in loss.grad_fn.saved_tensors if t.shape == (9, 16)]
    assert [t.dtype for t in saved] == [torch.bfloat16]


@pytest.mark.parametrize("with_gradient", [False, True])
def test_labels_must_have_the_shape_of_the_tokens(with_gradient: bool) -> None:
    x, weight, target, _ = inputs(torch.float32)
    labels = target[:-1]
    with (
        torch.set_grad_enabled(with_gradient),
        pytest.raises(DataError, match="8 labels do not fit 9 tokens"),
    ):
        linear_cross_entropy(x, weight, labels, group=one_rank(), num_columns=13)
