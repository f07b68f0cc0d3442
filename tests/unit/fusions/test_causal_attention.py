"""Causal attention in blocks of queries: values and gradients of the plain formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.fusions import causal_attention as fusion
from megatron.core.fusions.causal_attention import causal_attention
from tests.support import kernel_references as references
from tests.support import tolerances

S, B, N, D = 11, 2, 4, 8

pytestmark = pytest.mark.usefixtures("each_form")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks, the last one short, and three passes of three heads or fewer."""
    monkeypatch.setattr(fusion, "BLOCK", 4)
    monkeypatch.setattr(fusion, "_SCORES", 3 * 4 * S)


def inputs(num_groups: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values as a projection gives them: views of one tensor."""
    torch.manual_seed(0)
    mixed = torch.randn(S, B, num_groups, N // num_groups + 2, D, dtype=torch.float64).to(dtype)
    query, key, value = mixed.split([N // num_groups, 1, 1], 3)
    views = (query.flatten(2, 3), key.squeeze(3), value.squeeze(3))
    return [x.detach().requires_grad_() for x in views]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_groups", [4, 2, 1])
def test_values_and_gradients_are_those_of_the_formula(num_groups: int, dtype: torch.dtype):
    ours, plain = inputs(num_groups, dtype), inputs(num_groups, dtype)
    scale = torch.linspace(-1, 1, S * B * N * D).view(S, B, N, D).to(dtype)
    out, expected = causal_attention(*ours, 0.3), references.causal_attention(*plain, 0.3)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected, **tolerances.of(dtype))
    out.backward(scale)
    expected.backward(scale)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **tolerances.of(dtype))


def test_bf16_is_no_further_from_the_truth_than_the_kernel() -> None:
    exact = [x.detach().double() for x in inputs(4, torch.bfloat16)]
    q, k, v = (8 * exact[0]).bfloat16(), exact[1].bfloat16(), exact[2].bfloat16()
    truth = references.causal_attention(8 * exact[0], *exact[1:], 0.3)
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    kernel = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.3)
    error = (causal_attention(q, k, v, 0.3) - truth).norm()
    assert error < 1.5 * (kernel.permute(2, 0, 1, 3) - truth).norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_masks_of_blocks_hide_keys(dtype: torch.dtype, fused: bool) -> None:
    seen = (torch.rand(B, S, S) < 0.4) | torch.eye(S).bool()
    seen[:, :4] = True
    masks = [None, seen[:, 4:8, :8], seen[:, 8:]]
    ours, plain = inputs(4, dtype), inputs(4, dtype)
    out = causal_attention(*ours, 0.3, fused=fused, masks=masks)
    q, k, v = (x.permute(1, 2, 0, 3).to(torch.float64) for x in plain)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~seen.tril().unsqueeze(1), -torch.inf)
    expected = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).to(dtype)
    torch.testing.assert_close(out, expected, **tolerances.of(dtype))
    for result in (out, expected):
        result.sum().backward()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **tolerances.of(dtype))


def test_values_may_be_wider_than_keys() -> None:
    q, k, _ = inputs(4, torch.float64)
    v = torch.randn(S, B, N, 3, dtype=torch.float64, requires_grad=True)
    out = causal_attention(q, k, v, 0.3)
    torch.testing.assert_close(out, references.causal_attention(q, k, v, 0.3))
    out.sum().backward()
    assert v.grad is not None
    assert v.grad.shape == v.shape


def test_dropout_has_the_gradient_of_what_it_drew() -> None:
    def seeded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return causal_attention(q, k, v, 0.3, dropout=0.4)

    q, k, v = inputs(2, torch.float64)
    assert not torch.equal(seeded(q, k, v), causal_attention(q, k, v, 0.3))
    assert torch.autograd.gradcheck(seeded, (q, k, v), fast_mode=True)


def test_dropout_keeps_the_mean() -> None:
    q, k, v = (x.detach() for x in inputs(4, torch.float32))
    torch.manual_seed(0)
    mean = torch.stack([causal_attention(q, k, v, 0.3, dropout=0.4) for _ in range(800)]).mean(0)
    torch.testing.assert_close(mean, causal_attention(q, k, v, 0.3), rtol=0, atol=0.2)


def test_what_is_kept_is_in_the_compute_dtype_and_without_hidden_keys() -> None:
    out = causal_attention(*inputs(4, torch.bfloat16), 0.3)
    kept = out.grad_fn.saved_tensors[3:]  # behind queries, keys and values
    assert {t.dtype for t in kept} == {torch.bfloat16}
    assert sum(t.numel() for t in kept) == B * N * (4 * 4 + 4 * 8 + 3 * 11)
