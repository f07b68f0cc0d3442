"""Gemma 2: Gemma with norms on both sides, soft caps, and a window in every other layer."""

from __future__ import annotations

from typing import Any

from megatron.training.conversion.families.fields import (
    LLAMA_OUTSIDE,
    activation,
    same,
    windows,
)
from megatron.training.conversion.families.gemma import GEMMA, GEMMA_FIELDS
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Config, Family, Field
from megatron.training.conversion.shape import ModelShape


def _read_scale(config: Config) -> dict[str, Any]:
    return {"softmax_scale": float(config.get("query_pre_attn_scalar", 256) ** -0.5)}


def _write_scale(shape: ModelShape) -> dict[str, Any]:
    return {"query_pre_attn_scalar": round(shape.softmax_scale**-2)}


FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    always={**GEMMA, "layer_norm_placement": "sandwich"},
    fields=(
        *GEMMA_FIELDS,
        activation("hidden_activation", "gelu_pytorch_tanh"),
        same("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
        same("final_logit_softcapping", "final_logit_softcapping", 30.0),
        Field(_read_scale, _write_scale),
        windows(lambda config, layer: layer % 2 == 0),
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **LAYER,
        "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
        "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
        "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
    },
)
