"""Hugging Face families that can be converted, the simplest first."""

from __future__ import annotations

from megatron.training.conversion.families import (
    gemma,
    gemma2,
    gpt2,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
)
from megatron.training.conversion.family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, gemma, gemma2, phi3, olmo2, gpt2)
}
