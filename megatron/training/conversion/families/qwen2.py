"""Qwen 2 and 2.5: Llama with biases of queries, keys and values, and windows in upper layers."""

from __future__ import annotations

from megatron.training.conversion.families.fields import (
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    norm,
    tied,
    windows,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Config, Family


def is_upper(config: Config, layer: int) -> bool:
    """Whether a layer lies above those that attend fully."""
    return layer >= int(config.get("max_window_layers", 28))


FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    always={"add_qkv_bias": True},
    fields=(
        *LLAMA_FIELDS,
        norm(1e-6),
        activation("hidden_act", "silu"),
        tied(False),
        windows(is_upper, switch=True),
    ),
    outside=LLAMA_OUTSIDE,
    layer=LAYER,
)
