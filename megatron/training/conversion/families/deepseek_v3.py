"""DeepSeek V3: V2 with sigmoid scores, and a bias on them that balances the load."""

from __future__ import annotations

from megatron.training.conversion.families.deepseek_v2 import DEEPSEEK_LAYER, FIELDS
from megatron.training.conversion.families.experts import groups
from megatron.training.conversion.families.fields import LLAMA_OUTSIDE, demand
from megatron.training.conversion.family import Family

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
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **DEEPSEEK_LAYER,
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    },
)
