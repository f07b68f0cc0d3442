"""Kernels of experts: the choice of the plain router, its weights and gradients, and the order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.moe import fused_routing, routing
from megatron.core.transformer.moe.permute import by_expert
from megatron.core.transformer.moe.routing import Choice
from tests import tolerances

CHOICES = {
    "softmax over the chosen": Choice(k=3),
    "one expert": Choice(k=1, pre_softmax=True, scaling_factor=2.0),
    "softmax over all": Choice(k=2, pre_softmax=True, scaling_factor=1.5),
    "sigmoid": Choice(k=4, score_function="sigmoid", scaling_factor=2.5),
    "one by sigmoid": Choice(k=1, score_function="sigmoid"),
    "groups": Choice(k=4, score_function="sigmoid", num_groups=3, group_topk=2),
    "groups by one score": Choice(
        k=3, pre_softmax=True, num_groups=4, group_topk=3, group_score_topk=1
    ),
    "all experts": Choice(k=12),
}


def tokens(where: str) -> int:
    """Each token is a program of its own, which the interpreter takes 20 ms for."""
    return 9 if where == "cpu" else 64


def routed(route: Any, logits: Tensor, choice: Choice, bias: Tensor | None) -> list[Tensor]:
    """Experts, weights, and the gradient of the logits."""
    leaf = logits.clone().requires_grad_()
    found = route(leaf, choice, bias)
    grad = torch.linspace(-1, 1, found.weights.numel(), device=logits.device)
    found.weights.backward(grad.view_as(found.weights).to(logits.dtype))
    assert leaf.grad is not None
    return [found.experts, found.weights, leaf.grad]


@pytest.mark.feature("Experts: the choice of experts in one kernel of a GPU (--moe-router-fusion)")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_routing(name: str, has_bias: bool, where: str) -> None:
    choice = CHOICES[name]
    logits = torch.randn(tokens(where), 12, device=where).mul_(3)
    bias = torch.randn(12, device=where).mul_(0.1) if has_bias else None
    found = routed(fused_routing.route, logits, choice, bias)
    wide = None if bias is None else bias.double()
    expected = routed(routing.route, logits.double(), choice, wide)
    torch.testing.assert_close(found[0], expected[0], **tolerances.BITWISE)
    for ours, plain in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, plain.float(), **tolerances.of(torch.float32))


@pytest.mark.parametrize("name", CHOICES)
def test_equal_scores_go_to_the_lower_number(name: str, where: str) -> None:
    """Few different logits: nearly every choice is a tie; zeros of both signs are equal."""
    choice = CHOICES[name]
    signs = torch.tensor([1.0, -1.0], device=where).repeat(6)
    logits = torch.randint(-1, 2, (tokens(where), 12), device=where).float() * signs
    logits[0], logits[1] = 0.0, -100.0
    found, plain = fused_routing.route(logits, choice), routing.route(logits, choice)
    torch.testing.assert_close(found.experts, plain.experts, **tolerances.BITWISE)
    torch.testing.assert_close(found.weights, plain.weights, **tolerances.of(torch.float32))


def test_the_best_experts_of_the_balance_loss(where: str) -> None:
    scores = torch.randint(0, 5, (tokens(where), 20), device=where).float()
    scores[3] = float("-inf")
    found = fused_routing.best(scores, 7)
    torch.testing.assert_close(found, routing.best(scores, 7), **tolerances.BITWISE)
    assert fused_routing.best(scores[:0], 7).shape == (0, 7)


@pytest.mark.feature("Experts: the order of tokens in one kernel of a GPU (--moe-permute-fusion)")
@pytest.mark.parametrize("num_visits", [0, 1, 127, 5000])
def test_the_order_of_visits(num_visits: int, where: str) -> None:
    """Also with numbers that nobody has, and with that of dropped visits, the highest."""
    experts = torch.randint(0, 6, (num_visits, 1), device=where)
    experts[experts == 3] = 5
    found, plain = by_expert(experts, highest=5), by_expert(experts)
    torch.testing.assert_close(found.visit, plain.visit, **tolerances.BITWISE)
    torch.testing.assert_close(found.row, plain.row, **tolerances.BITWISE)
