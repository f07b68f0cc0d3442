"""Qwen 2 MoE: Qwen 2 with experts, and one with a gate that every token visits."""

from __future__ import annotations

from megatron.training.conversion.families.experts import (
    EXPERT_LAYER,
    NORMED,
    PROJECTIONS,
    SPARSE,
    TOPK,
    WIDTH,
    gated,
)
from megatron.training.conversion.families.fields import (
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    demand,
    norm,
    same,
    tied,
    windows,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Config, Family


def _is_windowed(config: Config, layer: int) -> bool:
    """Every other layer of those below."""
    return layer % 2 == 0 and layer < int(config.get("max_window_layers", 28))


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    always={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    fields=(
        *LLAMA_FIELDS,
        norm(1e-6),
        activation("hidden_act", "silu"),
        tied(False),
        windows(_is_windowed, switch=True),
        demand("qkv_bias", True),
        same("num_experts", "num_experts", 60),
        TOPK,
        WIDTH,
        NORMED,
        SPARSE,
        same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **LAYER,
        **EXPERT_LAYER,
        **gated("mlp.shared_experts", "mlp.shared_expert", *PROJECTIONS),
        "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    },
)
