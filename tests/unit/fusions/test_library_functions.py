"""Megatron Core's fused functions compute torch's formulas, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compat import fusions
from megatron.core.enums import AttnMaskType

Function = Callable[..., Tensor]


def glu(act: Function, x: Tensor, bias: Tensor) -> Tensor:
    gate, up = (x + bias).chunk(2, -1)
    return act(gate) * up


gelu = partial(F.gelu, approximate="tanh")
FORMULAS: dict[str, tuple[Function, Function]] = {
    "bias_swiglu_impl": (fusions.bias_swiglu_impl, partial(glu, F.silu)),
    "bias_swiglu": (fusions.bias_swiglu, partial(glu, F.silu)),
    "without bias": (
        lambda x, bias: fusions.bias_swiglu_impl(x, None) + bias[:3],
        lambda x, bias: glu(F.silu, x, torch.zeros(())) + bias[:3],
    ),
    "weighted": (
        lambda x, w: fusions.weighted_bias_swiglu_impl(x, None, w.sum().expand(4, 2, 1)),
        lambda x, w: glu(F.silu, x, torch.zeros(())) * w.sum(),
    ),
    "bias_geglu_impl": (fusions.bias_geglu_impl, partial(glu, gelu)),
    "bias_gelu": (lambda x, bias: fusions.bias_gelu(bias, x), lambda x, bias: gelu(x + bias)),
    "bias_gelu_impl": (fusions.bias_gelu_impl, lambda x, bias: gelu(x + bias)),
    "bias_dropout_add": (
        lambda x, bias: fusions.bias_dropout_add_fused_train([x, bias], 3 * x, 0.0),
        lambda x, bias: x + bias + 3 * x,
    ),
    "inference": (
        lambda x, bias: fusions.bias_dropout_add_fused_inference((x, bias), x, 0.9),
        lambda x, bias: x + bias + x,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_fused_function_computes_its_formula(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=generator) for shape in ((4, 2, 6), (6,))]
    results = []
    for function in FORMULAS[name]:
        x, bias = (tensor.clone().requires_grad_() for tensor in inputs)
        y = function(x, bias)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, bias))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


def test_cross_entropy_of_one_process_needs_no_group() -> None:
    logits, target = torch.randn(4, 2, 6).bfloat16(), torch.arange(8).view(4, 2) % 6
    wide, highest = fusions.calculate_logits_max(logits)
    assert wide.dtype == torch.float32
    assert highest.equal(logits.float().amax(-1))
    loss = fusions.fused_vocab_parallel_cross_entropy(logits, target)  # type: ignore[call-arg]
    expected = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
    torch.testing.assert_close(loss.flatten(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_scales_masks_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 4, 4).to(dtype)

    def mask_func(x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_fill(mask, -torch.inf)

    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    for kind, mask in ((AttnMaskType.causal, None), (AttnMaskType.padding, causal)):
        softmax = fusions.FusedScaleMaskSoftmax(
            False, dtype == torch.bfloat16, kind, True, mask_func, True, 0.5
        )
        found = softmax(scores, mask)
        expected = torch.softmax(mask_func(scores.float() * 0.5, causal), -1).to(dtype)
        assert found.dtype == dtype
        assert found.equal(expected)
    with pytest.raises(AssertionError, match="needs softmax_in_fp32"):
        fusions.FusedScaleMaskSoftmax(False, False, kind, True, mask_func, False, 0.5)
