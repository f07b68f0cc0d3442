"""Padding visits no expert and changes no loss: rows with padding against rows without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.params.param_info import name_parameters
from megatron.core.params.param_init import initialize_parameters
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from tests.support.one_process import one_process_groups, tiny_config

EXPERTS = 4
HIDDEN = 8
LENGTH = 9
PADDING = 5
SITUATIONS: dict[str, dict[str, Any]] = {
    "no losses": {},
    "aux": {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.3,)},
    "sequence aux": {
        "moe_router_load_balancing_type": ("seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.3, 0.2),
    },
    "z": {"moe_z_loss_coeff": 0.2, "calculate_per_token_loss": True},
    "sinkhorn": {"moe_router_load_balancing_type": ("sinkhorn",), "moe_router_topk": 1},
    "capacity": {"moe_expert_capacity_factor": 0.7},
    "capacity by position": {
        "moe_expert_capacity_factor": 0.7,
        "moe_token_drop_policy": "position",
    },
    "padded to capacity": {
        "moe_expert_capacity_factor": 0.7,
        "moe_pad_expert_input_to_capacity": True,
    },
    "bias": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "shared": {"moe_shared_expert_intermediate_size": 6},
}


def layer_of(situation: str) -> MoELayer:
    config = tiny_config(
        **{
            "num_layers": 1,
            "hidden_size": HIDDEN,
            "num_attention_heads": 2,
            "ffn_hidden_size": 12,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "init_method_std": 0.5,
            "params_dtype": torch.float64,
            **SITUATIONS[situation],
        }
    )
    spec = get_gpt_layer_local_spec(EXPERTS, config=config).submodules.mlp
    offered = {"pg_collection": one_process_groups(), "layer_number": 1}
    layer = build_module(spec, config=config, offered=offered)
    name_parameters(layer)
    initialize_parameters(layer, 1234)
    assert isinstance(layer, MoELayer)
    return layer.train()


def computed(situation: str, x: Tensor, *padding: Tensor) -> dict[str, Tensor]:
    """Return the output, losses and gradients; the output of tokens is weighted differently."""
    layer = layer_of(situation)
    y, _ = layer(x, *padding)
    kept = y[:LENGTH]
    (kept * torch.linspace(-1, 1, kept.numel(), dtype=x.dtype).view_as(kept)).sum().backward()
    found = {"y": kept.detach(), **layer.router.aux_losses.take()}
    if layer.router.local_tokens_per_expert is not None:
        found["visits"] = layer.router.local_tokens_per_expert
    return found | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.feature("Experts: padding visits no expert and is not in auxiliary losses")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_padding_changes_nothing(situation: str) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(LENGTH + PADDING, 2, HIDDEN, generator=generator, dtype=torch.float64)
    is_padding = (torch.arange(LENGTH + PADDING) >= LENGTH).expand(2, -1)
    found = computed(situation, x, is_padding)
    wanted = computed(situation, x[:LENGTH])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_rows_of_different_length_have_the_mean_of_their_losses() -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(LENGTH + PADDING, 2, HIDDEN, generator=generator, dtype=torch.float64)
    ends = torch.tensor([[LENGTH], [LENGTH + PADDING]])
    is_padding = torch.arange(LENGTH + PADDING) >= ends
    found = computed("sequence aux", x, is_padding)["seq_load_balancing_loss"]
    parts = [x[:LENGTH, :1], x[:, 1:]]
    each = [computed("sequence aux", part)["seq_load_balancing_loss"] for part in parts]
    torch.testing.assert_close(found, sum(each) / 2, rtol=1e-12, atol=1e-12)


def test_rows_of_padding_alone_have_no_losses() -> None:
    x = torch.ones(3, 1, HIDDEN, dtype=torch.float64)
    layer = layer_of("aux")
    y, _ = layer(x, torch.ones(1, 3, dtype=torch.bool))
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert layer.router.aux_losses.take()["load_balancing_loss"] == 0
