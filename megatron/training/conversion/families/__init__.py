"""Hugging Face families that can be converted, the simplest first."""

from __future__ import annotations

from dataclasses import replace

from megatron.training.conversion.families.bert import BERT, MEGATRON_BERT
from megatron.training.conversion.families.experts import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    ERNIE_MOE,
    GLM4_MOE,
    GPT_OSS,
    HUNYUAN_MOE,
    KIMI_K2,
    MINIMAX_M2,
    MISTRAL4,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from megatron.training.conversion.families.linear import (
    KIMI_LINEAR,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
)
from megatron.training.conversion.families.llama import DENSE, GPT2, IN_VISION_LANGUAGE
from megatron.training.conversion.families.mamba import MAMBA2, NEMOTRON_H
from megatron.training.conversion.families.sparse import DEEPSEEK_V32, GLM_MOE_DSA
from megatron.training.conversion.families.t5 import T5
from megatron.training.conversion.family import Family, Field, mrope

_EXPERTS = (
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, OLMOE),
    *(MINIMAX_M2, ERNIE_MOE, HUNYUAN_MOE, GLM4_MOE, MISTRAL4, KIMI_K2, DEEPSEEK_V32, GLM_MOE_DSA),
)
_LINEAR = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID, KIMI_LINEAR)
_OTHERS = (BERT, MEGATRON_BERT, T5, MAMBA2, NEMOTRON_H)
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (*DENSE, GPT2, *_EXPERTS, *_LINEAR, *_OTHERS)
}
# The language model of Qwen3.5 with images, as in transformers without multi-token prediction.
_QWEN3_5_VL_TEXT = replace(
    QWEN3_5,
    model_type="qwen3_5_vl_text",
    fields=(
        *QWEN3_5.fields,
        mrope(10000.0, (11, 11, 10), 0.25),
        Field(lambda config: {"mtp_num_layers": None}),
    ),
)
# Language models that exist only within a larger model, by the model_type of its text_config.
PARTS: dict[str, Family] = {
    family.model_type: family for family in (*IN_VISION_LANGUAGE, _QWEN3_5_VL_TEXT)
}
