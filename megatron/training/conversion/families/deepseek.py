"""DeepSeek V2 and V3: latent attention, experts and shared experts, dense layers first."""

from __future__ import annotations

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.experts import (
    EXPERT_LAYER,
    FIRST_DENSE,
    PROJECTIONS,
    SCALED,
    SHARED,
    TOPK,
    WIDTH,
    gated,
    groups,
)
from megatron.training.conversion.families.fields import (
    LLAMA_OUTSIDE,
    ROPE,
    SIZES,
    activation,
    alike,
    demand,
    rope_of,
    same,
    tied,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Config, Family, Field, Names, Values
from megatron.training.conversion.shape import ModelShape


def _read_rope(config: Config) -> Values:
    rope = rope_of(config)
    if rope["rope_type"] not in ("default", "yarn"):
        raise CheckpointError(f"config.json has rope_type {rope['rope_type']}: only yarn is built")
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope["rope_type"] == "yarn" and (not mscale or mscale != of_all):
        raise CheckpointError(
            f"config.json has mscale {mscale} and mscale_all_dim {of_all}: only equal ones are "
            "built"
        )
    return {**ROPE.read(config), "rotary_percent": 1.0}


def _write_rope(shape: ModelShape) -> Values:
    """Write RoPE entries, with the type also under ``type``, which DeepSeek's own code reads."""
    out = ROPE.write(shape)
    scaling = out["rope_scaling"] and {"type": "yarn", **out["rope_scaling"]}
    return {**out, "rope_scaling": scaling}


_FIELDS = (
    *SIZES,
    same("attention_dropout", "attention_dropout", 0.0),
    Field(_read_rope, _write_rope),
    same("rms_norm_eps", "norm_epsilon", 1e-6),
    demand(rms_norm_eps=1e-6),  # the only epsilon of latent norms in transformers
    activation("hidden_act", "silu"),
    tied(False),
    demand(attention_bias=False),
    same("q_lora_rank", "q_lora_rank", None),
    *alike("kv_lora_rank", "v_head_dim"),
    same("qk_nope_head_dim", "qk_head_dim"),
    same("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    Field(
        lambda config: {"kv_channels": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]},
        lambda shape: {"num_key_value_heads": shape.num_attention_heads},
    ),
    same("n_routed_experts", "num_experts"),
    TOPK,
    WIDTH,
    SHARED,
    FIRST_DENSE,
    SCALED,
    demand(moe_layer_freq=1),
)
_ALWAYS: Values = {
    "multi_latent_attention": True,
    "qk_norm": "latent",
    "moe_router_dtype": "fp32",
}
_LAYER: Names = {
    **LAYER,
    **EXPERT_LAYER,
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    **gated("mlp.shared_experts", "mlp.shared_experts", *PROJECTIONS),
}


def _read_method(config: Config) -> Values:
    """Read the expert groups, which are used only with topk_method group_limited_greedy."""
    method = config.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        return _GROUPS.read(config)
    if method != "greedy":
        raise CheckpointError(f"config.json has topk_method {method}, which is not built here")
    return {}


_GROUPS = groups(1)

# Experts are scored by a softmax.
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    always={
        **_ALWAYS,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    },
    fields=(
        *_FIELDS,
        Field(
            _read_method,
            lambda shape: {
                "topk_method": (
                    "greedy" if shape.moe_router_num_groups is None else "group_limited_greedy"
                ),
                **_GROUPS.write(shape),
            },
        ),
        demand(
            norm_topk_prob=False,
            scoring_func="softmax",
            mlp_bias=False,
        ),
    ),
    outside=LLAMA_OUTSIDE,
    layer=_LAYER,
)

# Sigmoid scores, and a bias on them that balances the load.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    always={
        **_ALWAYS,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    fields=(
        *_FIELDS,
        groups(2),
        demand(
            norm_topk_prob=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            rope_interleave=True,
        ),
        same(
            "num_nextn_predict_layers",
            "mtp_num_layers",
            0,
            lambda count: count or None,
            lambda count: count or 0,
        ),
    ),
    outside=LLAMA_OUTSIDE,
    layer={**_LAYER, "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
    ahead={
        **{name: name for name in ("enorm", "hnorm", "eh_proj")},
        "final_layernorm": "shared_head.norm",
    },
    copies={
        "embedding.word_embeddings.weight": "embed_tokens.weight",
        "output_layer.weight": "shared_head.head.weight",
    },
)
