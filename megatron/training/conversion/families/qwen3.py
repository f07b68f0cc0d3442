"""Qwen 3: Llama with norms of each head's queries and keys, and windows in upper layers."""

from __future__ import annotations

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
from megatron.training.conversion.families.qwen2 import is_upper
from megatron.training.conversion.family import Family

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    always={"qk_norm": "head"},
    fields=(
        *LLAMA_FIELDS,
        same("head_dim", "kv_channels", 128),
        norm(1e-6),
        activation("hidden_act", "silu"),
        tied(False),
        windows(is_upper, switch=True),
        demand("attention_bias", False),
    ),
    outside=LLAMA_OUTSIDE,
    layer=LAYER,
)
