"""Kernels of experts: choice, weights and their gradients, order, and weight gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from megatron.core.transformer.moe import fused_routing, routing
from megatron.core.transformer.moe.grouped_linear import RowGroups, grouped_linear
from megatron.core.transformer.moe.lazy_token_counts import LazyTokenCounts
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
    found, plain = fused_routing.route(logits, choice), routing.route(logits.double(), choice)
    torch.testing.assert_close(found.experts, plain.experts, **tolerances.BITWISE)
    torch.testing.assert_close(found.weights, plain.weights.float(), **tolerances.of(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_experts_are_selected_without_a_sort(where: str, dtype: torch.dtype) -> None:
    """NaN is the largest, as in a sort."""
    scores = torch.randint(0, 5, (tokens(where), 20), device=where).to(dtype)
    scores[3] = float("-inf")
    scores[4, 5:15] = float("nan")
    expected = routing.best(scores.double(), 7)  # float64 has no kernel
    torch.testing.assert_close(routing.best(scores, 7), expected, **tolerances.BITWISE)
    assert routing.best(scores[:0], 7).shape == (0, 7)


@pytest.mark.feature("Experts: one kernel of a GPU computes the order of the tokens")
@pytest.mark.parametrize("num_visits", [0, 1, 127, 5000])
def test_the_order_of_visits(num_visits: int, where: str) -> None:
    """Also with numbers that nobody has, and with that of dropped visits, the highest."""
    experts = torch.randint(0, 6, (num_visits, 1), device=where)
    experts[experts == 3] = 5
    found, plain = by_expert(experts, highest=5), by_expert(experts)
    torch.testing.assert_close(found.visit, plain.visit, **tolerances.BITWISE)
    torch.testing.assert_close(found.row, plain.row, **tolerances.BITWISE)


OUT = 200  # neither is a multiple of a tile
IN = 136
ROWS = {"uneven": (70, 0, 129, 1), "first empty": (0, 5, 1, 64), "no rows": (0, 0, 0, 0)}


@pytest.mark.feature("Experts: one kernel adds the weight gradients of all experts (GPU)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("counts", ROWS.values(), ids=ROWS)
def test_weight_gradients_are_added_to_main_gradients(
    counts: tuple[int, ...], overwrites: bool, dtype: torch.dtype, where: str
) -> None:
    """Two micro-batches; rows after the last expert's, and memory between main gradients, stay."""
    weights, memory = parameters_of_a_buffer(len(counts), dtype, where)
    for weight in weights:
        weight.overwrite_main_grad = overwrites  # type: ignore[attr-defined]
    before = memory.clone()
    expected = memory[:, 0].double() * (not overwrites)
    for _ in range(2):
        rows, grad = (integers(where, sum(counts), width).bfloat16() for width in (IN, OUT))
        groups = RowGroups.on(rows.device, counts)
        grouped_linear(rows, groups, weights).backward(grad)
        parts = zip(expected, grad.double().split(counts), rows.double().split(counts), strict=True)
        for total, mine, x in parts:
            total += mine.t() @ x
    torch.testing.assert_close(memory[:, 1], before[:, 1], **tolerances.BITWISE)
    torch.testing.assert_close(memory[:, 0], expected.to(dtype), **tolerances.BITWISE)
    for weight in weights:
        assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert not weight.overwrite_main_grad  # type: ignore[attr-defined]
        assert weight.grad is None


def integers(where: str, *shape: int) -> Tensor:
    """All their sums of products are exact in 16 bits: the interpreter does not round."""
    return torch.randint(-1, 2, shape, device=where).float()


def parameters_of_a_buffer(
    count: int, dtype: torch.dtype, where: str
) -> tuple[list[torch.nn.Parameter], Tensor]:
    """Return weights whose main gradients are the first of each pair [count, 2, OUT, IN]."""
    memory = integers(where, count, 2, OUT, IN).to(dtype)
    weights = [torch.nn.Parameter(torch.randn(OUT, IN, device=where).bfloat16()) for _ in memory]
    for weight, (main_grad, _) in zip(weights, memory, strict=True):
        weight.main_grad = main_grad  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return weights, memory


def test_deferred_weight_gradients_are_added_without_counts_on_the_host(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AsyncHostCopy, "get_ints", lambda _: pytest.fail("the host waits"))
    counts = LazyTokenCounts(torch.tensor([4, 0, 3, 2], device=where))
    weights, memory = parameters_of_a_buffer(4, torch.float32, where)
    for weight in weights:
        weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    rows, grad = (torch.randn(9, n, device=where).bfloat16() for n in (IN, OUT))
    queue = WeightGradQueue()
    y = grouped_linear(rows, RowGroups.on(rows.device, counts), weights)
    with queue.collecting():
        y.backward(grad)
    assert len(queue) == 1
    assert weights[0].overwrite_main_grad  # type: ignore[attr-defined]
    queue.run()
    parts = zip(memory[:, 0], grad.split((4, 0, 3, 2)), rows.split((4, 0, 3, 2)), strict=True)
    for total, mine, x in parts:
        expected = (mine.double().t() @ x.double()).float()
        torch.testing.assert_close(total, expected, **tolerances.of(torch.float32))
