"""DeepSeek V3: V2 with sigmoid scores, and a bias on them that balances the load."""

from __future__ import annotations

from typing import Any

from megatron.training.conversion.families.deepseek_v2 import DEEPSEEK_LAYER, FIELDS
from megatron.training.conversion.families.experts import groups
from megatron.training.conversion.families.fields import LLAMA_OUTSIDE, demand
from megatron.training.conversion.family import Config, Family, Field

_AHEAD = "num_nextn_predict_layers"


def _read_ahead(config: Config) -> dict[str, Any]:
    return {"mtp_num_layers": config.get(_AHEAD) or None}


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    always={
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    fields=(
        *FIELDS,
        groups(2),
        demand("norm_topk_prob", True),
        demand("scoring_func", "sigmoid"),
        demand("topk_method", "noaux_tc"),
        demand("rope_interleave", True),
        Field(_read_ahead, lambda shape: {_AHEAD: shape.mtp_num_layers or 0}),
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **DEEPSEEK_LAYER,
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    },
    ahead={
        "enorm.weight": "enorm.weight",
        "hnorm.weight": "hnorm.weight",
        "eh_proj.weight": "eh_proj.weight",
        "final_layernorm.weight": "shared_head.norm.weight",
    },
    copies={
        "embedding.word_embeddings.weight": "embed_tokens.weight",
        "output_layer.weight": "shared_head.head.weight",
    },
)
