"""Hugging Face families that can be converted, the simplest first."""

from __future__ import annotations

from megatron.training.conversion.families import (
    bert,
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gpt2,
    gpt_oss,
    llama,
    mamba2,
    megatron_bert,
    mistral,
    mixtral,
    nemotron_h,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    t5,
)
from megatron.training.conversion.family import Family

_DENSE = (llama, mistral, qwen2, qwen3, gemma, gemma2, phi3, olmo2, gpt2)
_OTHERS = (bert, megatron_bert, t5, mamba2, nemotron_h)
_EXPERTS = (mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3, gpt_oss)
FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (*_DENSE, *_EXPERTS, *_OTHERS)
}
