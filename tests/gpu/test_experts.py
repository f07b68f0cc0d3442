"""Kernels of experts: choice, weights and their gradients, order, and weight gradients."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device, low_precision
from megatron.core.device.async_host_copy import AsyncHostCopy
from megatron.core.fusions import kernels
from megatron.core.low_precision import E4M3, E5M2
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.quantized_linear import Recipe
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.grouped_linear import LazyTokenCounts, RowGroups, grouped_linear
from megatron.core.transformer.moe.grouped_quantized_linear import GroupQuantizer
from megatron.core.transformer.moe.routing import RoutingRule
from megatron.core.transformer.moe.token_dispatcher import by_expert
from tests.gpu.conftest import has_fp8
from tests.support import tolerances
from tests.support.one_process import one_rank, tiny_config

CHOICES = {
    "softmax over the chosen": RoutingRule(k=3),
    "one expert": RoutingRule(k=1, pre_softmax=True, scaling_factor=2.0),
    "softmax over all": RoutingRule(k=2, pre_softmax=True, scaling_factor=1.5),
    "sigmoid": RoutingRule(k=4, score_function="sigmoid", scaling_factor=2.5),
    "one by sigmoid": RoutingRule(k=1, score_function="sigmoid"),
    "groups": RoutingRule(
        k=4, score_function="sigmoid", num_groups=3, groups_per_token=2, scores_per_group=2
    ),
    "groups by one score": RoutingRule(k=3, pre_softmax=True, num_groups=4, groups_per_token=3),
    "all experts": RoutingRule(k=12),
}


def tokens(where: str) -> int:
    """Each token is a program of its own, which the interpreter takes 20 ms for."""
    return 9 if where == "cpu" else 64


def routed(route: Any, logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> list[Tensor]:
    """Experts, weights, and the gradient of the logits."""
    leaf = logits.clone().requires_grad_()
    found = route(leaf, rule, bias)
    grad = torch.linspace(-1, 1, found.weights.numel(), device=logits.device)
    found.weights.backward(grad.view_as(found.weights).to(logits.dtype))
    assert leaf.grad is not None
    return [found.experts, found.weights, leaf.grad]


@pytest.mark.feature("Experts: the choice of experts in one kernel of a GPU (--moe-router-fusion)")
@pytest.mark.parametrize(
    ("name", "has_bias"),
    [
        (name, has_bias)
        for name, rule in CHOICES.items()
        for has_bias in (False, True)
        # The kernel has no bias that is added to logits.
        if not has_bias or rule.pre_softmax or rule.score_function == "sigmoid"
    ],
)
def test_routing(name: str, has_bias: bool, where: str) -> None:
    rule = CHOICES[name]
    logits = torch.randn(tokens(where), 12, device=where).mul_(3)
    bias = torch.randn(12, device=where).mul_(0.1) if has_bias else None
    found = routed(routing.route_fused, logits, rule, bias)
    wide = None if bias is None else bias.double()
    expected = routed(routing.route, logits.double(), rule, wide)
    torch.testing.assert_close(found[0], expected[0], **tolerances.BITWISE)
    for ours, plain in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, plain.float(), **tolerances.of(torch.float32))


@pytest.mark.parametrize("name", CHOICES)
def test_equal_scores_go_to_the_lower_number(name: str, where: str) -> None:
    """Few different logits: nearly every choice is a tie; zeros of both signs are equal."""
    rule = CHOICES[name]
    signs = torch.tensor([1.0, -1.0], device=where).repeat(6)
    logits = torch.randint(-1, 2, (tokens(where), 12), device=where).float() * signs
    logits[0], logits[1] = 0.0, -100.0
    found, plain = routing.route_fused(logits, rule), routing.route(logits.double(), rule)
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
    monkeypatch.setattr(AsyncHostCopy, "get_list", lambda _: pytest.fail("the host waits"))
    counts = LazyTokenCounts(torch.tensor([4, 0, 3, 2], device=where))
    weights, memory = parameters_of_a_buffer(4, torch.float32, where)
    for weight in weights:
        weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    rows, grad = (integers(where, 9, n).bfloat16() for n in (IN, OUT))
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
        torch.testing.assert_close(total, expected, **tolerances.BITWISE)


RECIPES: dict[str, Recipe] = {
    "current scaling": Recipe(E4M3, E5M2),
    "e4m3 gradients": Recipe(E4M3, E4M3),
    "delayed scaling": Recipe(E4M3, E5M2, history=2, takes_max=True, margin=1),
    "weight gradients in 16 bits": Recipe(E4M3, E5M2, wgrad=False),
    "blocks of 128": Recipe(E4M3, E4M3, block=128),
    "hybrid blocks of 128": Recipe(E4M3, E5M2, block=128, wgrad=False),
    "blocks of 32": Recipe(E4M3, E4M3, block=32, has_square_blocks=False),
    "hybrid blocks of 32": Recipe(E4M3, E5M2, block=32, has_square_blocks=False),
}


WIDE = 144  # more than a tile
NARROW = 48
needs_fp8 = pytest.mark.skipif(
    not has_fp8(), reason="fp8 formats need a compute capability of 8.9 or higher"
)


def few_bits(where: str, *shape: int, seed: int) -> Tensor:
    """Values that fp8 represents exactly, of magnitudes that differ by rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-3, 4, shape, generator=generator).double()
    rows, columns = (torch.arange(size) for size in shape)
    exponent = (rows // 30 % 4)[:, None] + (columns // 20 % 3)[None, :]
    return (codes * 2.0**exponent).to(where, torch.bfloat16)


def quantized_experts(
    recipe: Recipe, where: str, *, has_main_grad: bool, count: int, dtype: torch.dtype
) -> list[ColumnParallelLinear]:
    linears = []
    memory = torch.zeros(count, WIDE, NARROW, device=where)
    for number in range(count):
        linear = ColumnParallelLinear(
            NARROW,
            WIDE,
            config=tiny_config(params_dtype=dtype),
            init_method=Init("normal", 1),
            tp_group=one_rank(),
            bias=False,
            is_expert=True,
        ).to(where)
        assert linear.weight is not None
        linear.weight.data.copy_(few_bits(where, WIDE, NARROW, seed=number))
        if has_main_grad:
            linear.weight.main_grad = memory[number]  # type: ignore[attr-defined]
            linear.weight.overwrite_main_grad = True  # type: ignore[attr-defined]
        linear.quantize(recipe, one_rank())
        linears.append(linear)
    return linears


def trained(
    linears: Any, run: Any, counts: tuple[int, ...], where: str, *, batches: int
) -> list[Tensor]:
    """Outputs and gradients of some micro-batches, and the amax values that they leave."""
    found = []
    dtype = linears[0].weight.dtype
    for batch in range(batches):
        rows = few_bits(where, sum(counts), NARROW, seed=10 + batch).to(dtype).requires_grad_()
        y = run(linears, rows)
        y.backward(few_bits(where, sum(counts), WIDE, seed=20 + batch).to(dtype))
        assert rows.grad is not None
        found += [y.detach(), rows.grad]
    weights = [linear.weight for linear in linears]
    found += [getattr(weight, "main_grad", weight.grad) for weight in weights]
    delayed = [linear.quantizer for linear in linears if linear.quantizer.recipe.history]
    return found + [quantizer.amax for quantizer in delayed]


@needs_fp8
@pytest.mark.feature("Experts: fp8 GEMMs of all experts in one kernel without row counts (GPU)")
@pytest.mark.parametrize(
    ("name", "of_rows", "has_main_grad"),
    [
        *((name, "uneven", True) for name in RECIPES),
        ("current scaling", "first empty", True),
        ("delayed scaling", "no rows", True),
        ("current scaling", "uneven", False),
        ("blocks of 128", "first empty", False),
        ("blocks of 32", "first empty", True),
        ("weight gradients in 16 bits", "uneven", False),
    ],
)
def test_fp8_experts_are_those_of_a_loop(
    name: str,
    of_rows: str,
    has_main_grad: bool,
    where: str,
    plain: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    counts = ROWS[of_rows]
    batches = 2 if has_main_grad else 1  # 16 bits would round the sum of two

    def loop(linears: Any, rows: Tensor) -> Tensor:
        parts = zip(linears, rows.split(counts), strict=True)
        return torch.cat([linear(mine)[0] for linear, mine in parts])

    def grouped(linears: Any, rows: Tensor) -> Tensor:
        assert GroupQuantizer.unsupported_reason(linears, rows.device) is None
        quantizer = GroupQuantizer(linears)
        sizes = LazyTokenCounts(torch.tensor(counts, device=where))
        groups = RowGroups.on(rows.device, sizes)
        weights = [linear.weight for linear in linears]
        return grouped_linear(rows, groups, weights, quantizer)

    monkeypatch.setattr(device, "multiplies_fp8", lambda _: True)
    monkeypatch.setattr(AsyncHostCopy, "get_list", lambda _: pytest.fail("the host waits"))
    recipe = RECIPES[name]
    build = partial(quantized_experts, recipe, where, count=len(counts))
    linears = build(has_main_grad=has_main_grad, dtype=torch.bfloat16)
    found = trained(linears, grouped, counts, where, batches=batches)
    linears = build(has_main_grad=False, dtype=torch.float32)
    monkeypatch.setattr(device, "multiplies_fp8", lambda _: False)
    expected = plain(lambda: trained(linears, loop, counts, where, batches=batches))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, **tolerances.of(torch.bfloat16))


@needs_fp8
@pytest.mark.parametrize("name", ["current scaling", "blocks of 128"])
def test_deferred_weight_gradients_of_fp8_experts_are_the_same(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights are frozen, so that no kernel can add to all main gradients at once."""
    monkeypatch.setattr(device, "multiplies_fp8", lambda _: True)
    counts = (5, 0, 40)
    found = []
    for is_later, frozen in ((False, None), (True, None), (True, 1)):
        linears = quantized_experts(
            RECIPES[name], where, has_main_grad=True, count=3, dtype=torch.bfloat16
        )
        weights: list[Any] = [linear.weight for linear in linears]
        if frozen is not None:
            weights[frozen].requires_grad_(False)
        sizes = LazyTokenCounts(torch.tensor(counts, device=where))
        monkeypatch.setattr(AsyncHostCopy, "get_list", lambda _: pytest.fail("the host waits"))
        rows = few_bits(where, sum(counts), NARROW, seed=1).requires_grad_()
        groups = RowGroups.on(rows.device, sizes)
        queue = WeightGradQueue()
        y = grouped_linear(rows, groups, weights, GroupQuantizer(linears))
        with queue.collecting() if is_later else nullcontext():
            y.backward(few_bits(where, *y.shape, seed=2))
        assert len(queue) == is_later
        queue.run()
        assert [weight.overwrite_main_grad for weight in weights] == [
            number == frozen for number in range(3)
        ]
        found.append([weight.main_grad.clone() for weight in weights])
    torch.testing.assert_close(found[1], found[0], **tolerances.BITWISE)
    torch.testing.assert_close(found[2][::2], found[0][::2], **tolerances.BITWISE)
    torch.testing.assert_close(found[0][0].any(), torch.tensor(True, device=where))


@needs_fp8
@pytest.mark.parametrize("block", [0, 32, 128])
@pytest.mark.parametrize("of_rows", ROWS)
def test_codes_of_all_experts_are_those_of_each(block: int, of_rows: str, where: str) -> None:
    """Codes and scales, in rows and transposed, whose padding is 0."""
    fused = kernels.find("quantize", torch.empty(1, device=where))
    assert fused is not None
    counts = ROWS[of_rows]
    x = few_bits(where, sum(counts) + 3, WIDE, seed=0)
    ends = torch.tensor(counts, device=where).cumsum(0, dtype=torch.int32)
    amax = None if block else fused.amax_of_groups(x, ends)
    found = fused.quantize_groups(
        x, torch.float8_e5m2, ends, amax=amax, block=block, rows=True, turned=True
    )
    begin = 0
    at = 0  # in the transposed codes
    for number, count in enumerate(counts):
        mine = x[begin : begin + count]
        high = -(-count // 128) * 128
        rows = low_precision.plain_quantize(mine, E5M2, (1, block) if block else None)
        columns = low_precision.plain_quantize(mine, E5M2, (block, 1) if block else None)
        codes = [found[0][0][begin : begin + count], found[1][0][:, at : at + high].t()]
        if block:
            blocks = slice(at // block, at // block + len(columns.scale))
            scales = [found[0][1][:, begin : begin + count].t(), found[1][1][blocks]]
        else:
            scales = [found[0][1][number], found[1][1][number]] if count else []
        expected = [rows.codes, F.pad(columns.codes.float(), (0, 0, 0, high - count))]
        for ours, theirs in zip(codes, expected, strict=True):
            torch.testing.assert_close(ours.float(), theirs.float(), **tolerances.BITWISE)
        for ours, theirs in zip(scales, (rows.scale, columns.scale), strict=bool(scales)):
            torch.testing.assert_close(ours, theirs, **tolerances.BITWISE)
        begin += count
        at += high


@needs_fp8
@pytest.mark.parametrize(("block", "is_square"), [(128, True), (32, False)])
def test_blocks_of_matrices_are_those_of_each(block: int, is_square: bool, where: str) -> None:
    fused = kernels.find("quantize", torch.empty(1, device=where))
    assert fused is not None
    matrices = torch.stack([few_bits(where, WIDE, NARROW, seed=number) for number in range(3)])
    for turned in (False,) if is_square else (False, True):
        codes, scale = fused.quantize_matrices(
            matrices, torch.float8_e4m3fn, block, is_square=is_square, turned=turned
        )
        for number, matrix in enumerate(matrices.transpose(1, 2) if turned else matrices):
            shape = (block if is_square else 1, block)
            expected = low_precision.plain_quantize(matrix.contiguous(), E4M3, shape)
            own = scale[number, : expected.scale.shape[1]].t()
            torch.testing.assert_close(own, expected.scale, **tolerances.BITWISE)
            ours = codes[number].float()
            torch.testing.assert_close(ours, expected.codes.float(), **tolerances.BITWISE)


@needs_fp8
def test_a_value_of_an_expert_that_is_not_finite_makes_its_results_nan(where: str) -> None:
    fused = kernels.find("quantize", torch.empty(1, device=where))
    assert fused is not None
    x = few_bits(where, 40, 32, seed=0)
    x[3, 5] = float("inf")
    ends = torch.tensor([0, 10, 30], dtype=torch.int32, device=where)
    amax = fused.amax_of_groups(x, ends)
    expected_amax = torch.stack([x.new_zeros(()), x[:10].abs().max(), x[10:30].abs().max()])
    torch.testing.assert_close(amax, expected_amax.float(), **tolerances.BITWISE)
    (codes, scale), _ = fused.quantize_groups(x, torch.float8_e4m3fn, ends, amax=amax)
    is_nan = torch.tensor([False, True, False], device=where)
    torch.testing.assert_close(scale.isnan(), is_nan, **tolerances.BITWISE)
    expected = low_precision.plain_quantize(x[10:30], E4M3)
    torch.testing.assert_close(scale[2], expected.scale, **tolerances.BITWISE)
    torch.testing.assert_close(codes[10:30].float(), expected.codes.float(), **tolerances.BITWISE)
