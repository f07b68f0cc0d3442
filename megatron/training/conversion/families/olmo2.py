"""OLMo 2: Llama with norms behind attention and MLP, and norms over all queries and all keys."""

from __future__ import annotations

from megatron.training.conversion.families.fields import (
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    demand,
    norm,
    tied,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Family

FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    always={"layer_norm_placement": "post", "qk_norm": "wide"},
    fields=(
        *LLAMA_FIELDS,
        norm(1e-5),
        activation("hidden_act", "silu"),
        tied(False),
        demand("attention_bias", False),
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **LAYER,
        "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
        "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
    },
)
