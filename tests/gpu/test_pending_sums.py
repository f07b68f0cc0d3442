"""Layers pass sums of the residual stream on to the norms that read them, in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.fusions import rms_norm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import norms
from megatron.core.transformer.transformer_block import TransformerBlock
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config

S, B, H = 3, 2, 64


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let narrow rows have kernels, and note which kernels add."""
    calls: list[str] = []
    monkeypatch.setattr(rms_norm, "_WIDTHS", range(H, H + 1))

    def noted(*given: Any) -> Any:
        calls.append(FUSED if len(given) > 3 else ALONE)  # parameters of a norm
        return rms_norm.norm_rows_of_sum(*given)

    monkeypatch.setattr(norms, "norm_rows_of_sum", noted)
    return calls


def block(where: str, **changes: Any) -> TransformerBlock:
    config = tiny_config(hidden_size=H, **{"num_layers": 3, "bias_dropout_fusion": True} | changes)
    torch.manual_seed(3)
    spec = get_gpt_layer_local_spec(config=config)
    made = TransformerBlock(config, spec, pg_collection=one_process_groups())
    for param in made.parameters():
        param.data = 0.2 * torch.randn_like(param)
    return made.to(where)


def results(made: TransformerBlock, where: str) -> list[Tensor]:
    torch.manual_seed(4)
    x = torch.randn(S, B, H, device=where, requires_grad=True)
    made.zero_grad()
    out = made(x, None)
    grad = torch.linspace(-0.1, 0.1, out.numel(), device=where)
    torch.autograd.backward(out, grad.view_as(out))
    grads = [x.grad, *(p.grad for p in made.parameters())]
    return [out.detach(), *(grad.clone() for grad in grads if grad is not None)]


FUSED, ALONE = "with its norm", "alone"
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, [FUSED] * 6),
    ({"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True}, [FUSED] * 6),
    ({"apply_residual_connection_post_layernorm": True}, [FUSED] * 6),
    ({"fp32_residual_connection": True}, [FUSED] * 6),
    (
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
        [ALONE] * 5 + [FUSED],
    ),
    (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        [FUSED, ALONE, *[FUSED] * 4, FUSED, ALONE],
    ),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_a_layer_passes_its_sums_to_the_next_norm(
    changes: dict[str, Any],
    expected: list[str],
    fused: list[str],
    where: str,
    plain: Callable[..., Any],
) -> None:
    made = block(where, **changes)
    found = results(made, where)
    assert fused == expected
    without = plain(lambda: results(made, where))
    assert fused == expected
    torch.testing.assert_close(found, without, **tolerances.of(torch.float32))


def test_no_bias_dropout_fusion_leaves_sums_to_layers(fused: list[str], where: str) -> None:
    results(block(where), where)
    assert len(fused) == 6
    results(block(where, bias_dropout_fusion=False), where)
    assert len(fused) == 6


def test_hooks_of_layers_see_tensors(fused: list[str], where: str) -> None:
    made, seen = block(where), []

    def hook(layer: nn.Module, given: object, out: tuple[object, ...]) -> None:
        seen.append(type(out[0]))

    made.layers[0].register_forward_hook(hook)
    results(made, where)
    assert seen == [Tensor]
    assert fused == [FUSED, ALONE, *[FUSED] * 4]


def test_dropout_of_a_pending_sum_is_repeated_by_recomputation(
    fused: list[str], where: str
) -> None:
    changes = {"recompute_granularity": "full", "recompute_method": "uniform"}
    found = []
    for recompute in ({}, {**changes, "recompute_num_layers": 2}):
        made = block(where, num_layers=2, hidden_dropout=0.25, **recompute)
        found.append(results(made, where))
    torch.testing.assert_close(found[0][1:], found[1][1:], **tolerances.of(torch.float32))
