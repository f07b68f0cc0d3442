"""Qwen 3 MoE: Qwen 3 with experts, and a window in every layer or in none."""

from __future__ import annotations

from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.experts import (
    EXPERT_LAYER,
    NORMED,
    SPARSE,
    TOPK,
    WIDTH,
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
from megatron.training.conversion.family import Config, Family, Field


def _read_count(config: Config) -> dict[str, Any]:
    """Published models say ``num_experts``; transformers 5.23 writes the other name."""
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        raise CheckpointError("config.json has no num_experts")
    return {"num_experts": count}


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    always={"qk_norm": "head"},
    fields=(
        *LLAMA_FIELDS,
        same("head_dim", "kv_channels", None),
        norm(1e-6),
        activation("hidden_act", "silu"),
        tied(False),
        windows(switch=True),
        demand("attention_bias", False),
        Field(_read_count, lambda shape: {"num_experts": shape.num_experts}),
        TOPK,
        WIDTH,
        NORMED,
        SPARSE,
    ),
    outside=LLAMA_OUTSIDE,
    layer={**LAYER, **EXPERT_LAYER},
)
