"""Each kernel has the values and gradients of its plain form, on sizes that fill no block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.fusions import linear_cross_entropy as loss_fusion
from megatron.core.fusions.bias_glu import activation, glu, glu_reference, weighed
from megatron.core.fusions.linear_cross_entropy import VocabularyPart, loss_and_gradient
from megatron.core.fusions.rms_norm import norm_rows_of_sum
from megatron.core.fusions.rope import RotaryTable, apply_rotary, split_and_rotate
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.token_dispatcher import Order, by_expert, combine, expand
from tests.support import kernel_references as references
from tests.support import tolerances
from tests.support.one_process import one_rank

DTYPES = [torch.float32, torch.bfloat16]


def values_and_gradients(function: Callable[..., Tensor], *inputs: Tensor | None) -> list[Any]:
    """Of ``function``, for a gradient that differs everywhere."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    out.backward(grad.bfloat16().to(out.dtype))
    return [out, *(None if leaf is None else leaf.grad for leaf in leaves)]


def compare(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor | None
) -> None:
    """The reference computes in float64 on the same numbers."""
    found = values_and_gradients(kernel, *inputs)
    wide = values_and_gradients(reference, *(None if t is None else t.double() for t in inputs))
    for ours, expected in zip(found, wide, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected.to(ours.dtype), **tolerances.of(ours.dtype))


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "openai_gelu": openai_gelu,
    "quick_gelu": quick_gelu,
    "squared_relu": squared_relu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated_activations(act: str, dtype: torch.dtype, where: str) -> None:
    x = torch.randn(3, 2, 2 * 1300, device=where).mul_(2).to(dtype)
    function = ACTIVATIONS[act]
    compare(lambda x: glu(x, function), lambda x: glu_reference(x, function), x)


@pytest.mark.parametrize("act", [F.silu, quick_gelu])
def test_gated_activations_clamped_offset_and_weighed(act: Any, where: str) -> None:
    x, weights = torch.randn(5, 2 * 1100, device=where).mul_(2), torch.rand(5, device=where)

    def reference(x: Tensor, weights: Tensor) -> Tensor:
        return weighed(glu_reference(x, act, 0.7, 1.0), weights)

    compare(lambda x, w: glu(x, act, 0.7, 1.0, w), reference, x, weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_with_a_bias(act: str, dtype: torch.dtype, where: str) -> None:
    # Several programs, or sums that are exact enough for float32.
    rows, scale = (67, 2) if dtype == torch.bfloat16 else (2, 0.3)
    x = torch.randn(rows, 3, 520, device=where).mul_(scale).to(dtype)
    bias = torch.randn(520, device=where).mul_(scale).to(dtype)
    function = ACTIVATIONS[act]
    compare(lambda x, b: activation(x, function, b), lambda x, b: function(x + b), x, bias)


def test_an_activation_with_a_bias_of_no_tokens(where: str) -> None:
    x = torch.randn(0, 8, device=where)
    bias = torch.randn(8, device=where, requires_grad=True)
    activation(x, F.gelu, bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.zeros_like(bias))


def test_gated_activations_of_no_tokens(where: str) -> None:
    x = torch.randn(0, 8, device=where, requires_grad=True)
    glu(x, F.silu).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [24, 14])
def test_rotary_positions(rotated: int, dtype: torch.dtype, where: str) -> None:
    angles = torch.randn(5, 2, 1, rotated // 2, device=where)
    table = RotaryTable(angles.cos(), angles.sin())
    wide = torch.randn(5, 2, 3, 40, device=where).to(dtype)
    both = [lambda x, f=f: f(x[..., 4:28], table) for f in (apply_rotary, references.apply_rotary)]
    compare(*both, wide)


def test_interleaved_pairs_are_rotated_without_a_kernel(where: str, kernels_used: set[str]) -> None:
    angles = torch.randn(5, 2, 1, 12, device=where)
    table = RotaryTable(angles.cos(), angles.sin(), interleaved=True)
    packed = torch.randn(5, 2, 3, 4 * 24, device=where)
    compare(
        lambda x: split_and_rotate(x, 24, table, fused=True)[0],
        lambda x: references.apply_rotary(x[..., : 2 * 24].reshape(5, 2, 6, 24), table),
        packed,
    )
    assert not kernels_used
    apply_rotary(packed, RotaryTable(table.cos, table.sin))  # each test meets a kernel
    assert kernels_used == {"rope"}


def test_rotary_positions_of_all_sequences_alike(where: str) -> None:
    angles = torch.randn(5, 1, 1, 4, device=where)
    table = RotaryTable(angles.cos(), angles.sin())
    x = torch.randn(5, 1, 600, 8, device=where)
    compare(lambda x: apply_rotary(x, table), lambda x: references.apply_rotary(x, table), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "groups", "per_group", "rotated"), [(5, 3, 2, 24), (5, 3, 2, 14), (1, 1, 5, 24)]
)
def test_splitting_and_rotating_a_packed_projection(
    tokens: int,
    groups: int,
    per_group: int,
    rotated: int,
    dtype: torch.dtype,
    where: str,
    kernels_used: set[str],
) -> None:
    """The gradients of queries, keys and values come in attention's order of dimensions."""
    width, counts = 24, (groups * per_group, groups, groups)
    angles = torch.randn(tokens, 2, 1, rotated // 2, device=where)
    table = RotaryTable(angles.cos(), angles.sin())

    def ours(packed: Tensor) -> Tensor:
        parts = split_and_rotate(packed, width, table, fused=True)
        assert [p.shape for p in parts] == [(tokens, 2, n, width) for n in counts]
        return torch.cat([p.transpose(0, 2) for p in parts])

    def reference(packed: Tensor) -> Tensor:
        query, key, value = packed.split([per_group * width, width, width], -1)
        query = query.reshape(tokens, 2, -1, width)
        turned = [references.apply_rotary(x, table) for x in (query, key)]
        return torch.cat([p.transpose(0, 2) for p in (*turned, value)])

    compare(
        ours, reference, torch.randn(tokens, 2, groups, (per_group + 2) * width).to(where, dtype)
    )
    assert "rope" in kernels_used


def some_logits(where: str, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    logits = torch.randn(4, width, device=where).mul_(5).to(dtype)
    logits[1] -= 1000
    columns = torch.tensor([[0, 1], [width - 3, 2], [-100, 3], [77, 4]], device=where)
    target = columns[:, 0]  # not contiguous, as a caller's labels may be
    return logits, target


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("width", [5001, 131])
def test_the_loss_and_its_gradient(width: int, dtype: torch.dtype, where: str) -> None:
    logits, target = some_logits(where, dtype, width)
    leaf = logits.double().requires_grad_()
    expected = F.cross_entropy(leaf[:, : width - 2], target, reduction="none", ignore_index=-100)
    scale = loss_fusion.gradient_scale(dtype)
    (expected.sum() * scale).backward()
    loss = loss_and_gradient(logits, target, VocabularyPart(one_rank(), width - 2))
    torch.testing.assert_close(loss, expected.float(), **tolerances.of(torch.float32))
    assert leaf.grad is not None
    torch.testing.assert_close(logits, leaf.grad.to(dtype), **tolerances.of(dtype))
    torch.testing.assert_close(logits[2], torch.zeros_like(logits[2]), **tolerances.BITWISE)


@pytest.mark.parametrize(("rank", "columns"), [(0, 501), (1, 499), (2, 0)])
def test_the_loss_of_a_divided_vocabulary(
    rank: int, columns: int, where: str, plain: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each third of the columns; the last is padding alone."""
    logits, target = some_logits(where, torch.float32, 1503)
    # What other ranks know is not asked for: any sum will do.
    monkeypatch.setattr(loss_fusion, "_sum_over_ranks", lambda own, *rest: own.clamp_min(2))

    def results() -> list[Tensor]:
        own, group = logits[:, 501 * rank : 501 * rank + 501].clone(), Group(rank)
        part = VocabularyPart(group, columns)
        rows = loss_fusion._Rows(target, part, (len(target), 501))
        sums = loss_fusion._own_sums(own, rows, slice(None))
        loss = loss_fusion._turn_into_gradient_divided(own, rows, group)
        own[2] = 0  # is never looked at, and plain torch leaves the softmax there
        again = logits[:, 501 * rank : 501 * rank + 501].clone()
        both = sums[0].clamp_min(2), torch.tensor([0.5, 2.0, 3.0, -1.0], device=where)
        loss_fusion.gradient_from_sums(again, target, both, part)
        return [*sums, loss, own, again]

    torch.testing.assert_close(results(), plain(results), **tolerances.of(torch.float32))


class Group:
    """A rank of three, as far as the arithmetic asks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_residual(dtype: torch.dtype, where: str) -> None:
    """In a float32 residual stream too."""
    x, bias = (torch.randn(s, device=where).to(dtype) for s in ((3, 5, 130), (130,)))
    residual = torch.randn(3, 5, 130, device=where)

    def seam(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return norm_rows_of_sum((x, bias), residual, 0.0)[0]

    compare(seam, lambda x, bias, residual: x + bias + residual, x, bias, residual)


def test_dropout_comes_from_the_generator_and_comes_again(where: str) -> None:
    x, residual = torch.ones(3, 1111, device=where), torch.zeros(3, 1111, device=where)
    leaf = x.clone().requires_grad_()

    def drop(x: Tensor) -> Tensor:
        return norm_rows_of_sum((x, None), residual, 0.25)[0]

    torch.manual_seed(7)
    first, second = drop(leaf), checkpoint(drop, False, leaf)
    torch.manual_seed(7)
    torch.testing.assert_close(drop(x), first, **tolerances.BITWISE)  # one seed, one mask
    kept = first != 0
    torch.testing.assert_close(first[kept], torch.full_like(first[kept], 4 / 3))
    shares = torch.stack([kept.float().mean(), (kept & (second != 0)).float().mean()])
    torch.testing.assert_close(shares, shares.new_tensor([0.75, 0.5625]), atol=0.03, rtol=0)
    second.sum().backward()  # the mask of the recomputation is that of the first time
    torch.testing.assert_close(leaf.grad, second.detach(), **tolerances.BITWISE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left_out", [0, 3])
def test_rows_of_tokens(left_out: int, dtype: torch.dtype, where: str) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(4, generator=generator)[:3] for _ in range(7)])
    order: Order = by_expert(experts.to(where), 21 - left_out)
    weights = torch.rand(21 - left_out, 1, device=where).to(dtype)

    def reference(x: Tensor) -> Tensor:
        rows = x[order.token] * weights
        return torch.zeros_like(x).index_add(0, order.token, rows)

    x = torch.randn(7, 1100, device=where).to(dtype)
    compare(lambda x: combine(expand(x, order) * weights, order), reference, x)


@pytest.mark.parametrize(
    ("stream", "dtype"),
    [*zip(DTYPES, DTYPES, strict=True), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize(("rows", "is_rms"), [(5, True), (5, False), (1, True)])
def test_norms_of_sums_with_the_residual_stream(
    rows: int,
    is_rms: bool,
    stream: torch.dtype,
    dtype: torch.dtype,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum and its norm; both have gradients, and so has the bias.

    Two programs sum up the weight's gradient, one of them over fewer rows.
    """
    monkeypatch.setattr("megatron.core.fusions.triton.norm._ROWS", 2)
    width = 1030
    # Eighths, whose sums bfloat16 has: the norm is of the rounded sum.
    x, bias, residual = (
        torch.randint(-16, 17, shape, device=where).div(8).to(to)
        for shape, to in (((rows, 1, width), dtype), ((width,), dtype), ((rows, 1, width), stream))
    )
    weight, shift = torch.randn(2, width, device=where).to(dtype)

    def ours(x: Tensor, bias: Tensor | None, residual: Tensor, *parameters: Tensor) -> Tensor:
        both = parameters if len(parameters) == 2 else (*parameters, None)
        total, normed = norm_rows_of_sum((x, bias), residual, 0.0, both, 1e-3)
        assert (total.dtype, normed.dtype) == (residual.dtype, weight.dtype)
        return torch.cat([total.to(dtype), normed])

    def reference(x: Tensor, bias: Tensor | None, residual: Tensor, *parameters: Tensor) -> Tensor:
        total = residual + (x if bias is None else x + bias)
        if is_rms:
            normed = references.rms_norm(total, *parameters, 1e-3)
        else:
            normed = F.layer_norm(total, (width,), *parameters, 1e-3)
        return torch.cat([total, normed])

    parameters = [weight] if is_rms else [weight, shift]
    for some_bias in (bias, None):
        compare(ours, reference, x, some_bias, residual, *parameters)


@pytest.mark.parametrize("width", [1028, 1030])
def test_norms_of_sums_drop_as_the_generator_says(width: int, where: str) -> None:
    """The mask of backward is that of forward; a sum alone drops the same values."""
    x, residual = torch.ones(7, width, device=where), torch.zeros(7, width, device=where)
    weight, leaf = torch.ones(width, device=where), x.clone().requires_grad_()
    bias = torch.zeros(width, device=where, requires_grad=True)
    torch.manual_seed(7)
    total, _ = norm_rows_of_sum((leaf, bias), residual, 0.25, (weight, None), 1e-3)
    total.sum().backward()
    torch.testing.assert_close(leaf.grad, total.detach(), **tolerances.BITWISE)
    torch.testing.assert_close(bias.grad, total.detach().sum(0))
    kept = (total != 0).float().mean()
    torch.testing.assert_close(kept, kept.new_tensor(0.75), atol=0.03, rtol=0)
    torch.manual_seed(7)
    alone, _ = norm_rows_of_sum((x, None), residual, 0.25)
    torch.testing.assert_close(alone, total.detach(), **tolerances.BITWISE)
