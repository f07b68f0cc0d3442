"""Gemma 1: Llama with norms stored as distances from one, a gated GELU and scaled embeddings."""

from __future__ import annotations

from typing import Any

from megatron.training.conversion.families.fields import (
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    demand,
    norm,
    same,
    tied,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Family

GEMMA: dict[str, Any] = {"apply_layernorm_1p": True, "embedding_scale": 0}  # 0: root of the width
GEMMA_FIELDS = (
    *LLAMA_FIELDS,
    same("head_dim", "kv_channels", 256),
    norm(1e-6),
    tied(True),
    demand("attention_bias", False),
)

FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    always=GEMMA,
    fields=(*GEMMA_FIELDS, activation("hidden_act", "gelu_pytorch_tanh", "hidden_activation")),
    outside=LLAMA_OUTSIDE,
    layer=LAYER,
)
