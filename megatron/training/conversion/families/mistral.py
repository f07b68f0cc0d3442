"""Mistral: Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from megatron.training.conversion.families.fields import (
    HEAD_DIM,
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    norm,
    tied,
    windows,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Family

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(
        *LLAMA_FIELDS,
        HEAD_DIM,
        norm(1e-6),
        activation("hidden_act", "silu"),
        tied(False),
        windows(),
    ),
    outside=LLAMA_OUTSIDE,
    layer=LAYER,
)
