"""DeepSeek V2 and V3: latent attention, experts and shared experts, dense layers first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.experts import (
    EXPERT_LAYER,
    FIRST_DENSE,
    PROJECTIONS,
    SHARED,
    TOPK,
    WIDTH,
    gated,
    groups,
)
from megatron.training.conversion.families.fields import (
    LLAMA_OUTSIDE,
    SIZES,
    activation,
    demand,
    rope_of,
    same,
    tied,
    yarn,
    yarn_entries,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Config, Family, Field
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule


def _read_rope(config: Config) -> dict[str, Any]:
    rope = rope_of(config)
    out = {"rotary_base": rope["rope_theta"]}
    if rope["kind"] == "default":
        return out
    if rope["kind"] != "yarn":
        raise CheckpointError(f"config.json has rope_type {rope['kind']}: only yarn is built")
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if not mscale or mscale != of_all:
        raise CheckpointError(
            f"config.json has mscale {mscale} and mscale_all_dim {of_all}: only equal ones are "
            "built"
        )
    return out | yarn(rope, config)


def _write_rope(shape: ModelShape) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_theta": float(shape.rotary_base), "rope_scaling": None}
    if shape.rotary_scaling_factor != 1:
        out["rope_scaling"] = {"type": "yarn", **yarn_entries(shape)}
    return out


def _read_heads(config: Config) -> dict[str, Any]:
    rotated = config["qk_rope_head_dim"]
    return {
        "multi_latent_attention": True,
        "qk_norm": "latent",
        "qk_pos_emb_head_dim": rotated,
        "kv_channels": config["qk_nope_head_dim"] + rotated,
    }


def _write_heads(shape: ModelShape) -> dict[str, Any]:
    heads = shape.num_attention_heads
    return {"qk_rope_head_dim": shape.qk_pos_emb_head_dim, "num_key_value_heads": heads}


def _read_factor(config: Config) -> dict[str, Any]:
    return {"moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0)}


def _write_factor(shape: ModelShape) -> dict[str, Any]:
    return {"routed_scaling_factor": shape.moe_router_topk_scaling_factor or 1.0}


_FIELDS = (
    *SIZES,
    same("attention_dropout", "attention_dropout", 0.0),
    Field(_read_rope, _write_rope),
    same("rms_norm_eps", "norm_epsilon", 1e-6),
    demand("rms_norm_eps", 1e-6),  # transformers' norms of narrow vectors have no other
    activation("hidden_act", "silu"),
    tied(False),
    demand("attention_bias", False),
    same("q_lora_rank", "q_lora_rank", None),
    same("kv_lora_rank", "kv_lora_rank"),
    same("qk_nope_head_dim", "qk_head_dim"),
    same("v_head_dim", "v_head_dim"),
    Field(_read_heads, _write_heads),
    same("n_routed_experts", "num_experts"),
    TOPK,
    WIDTH,
    SHARED,
    FIRST_DENSE,
    Field(_read_factor, _write_factor),
    demand("moe_layer_freq", 1),
)
_LAYER: Mapping[str, str | Rule] = {
    **LAYER,
    **EXPERT_LAYER,
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    **gated("mlp.shared_experts", "mlp.shared_experts", *PROJECTIONS),
}


def _read_method(config: Config) -> dict[str, Any]:
    """Groups count only where the method names them."""
    method = config.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        return dict(_GROUPS.read(config))
    if method != "greedy":
        raise CheckpointError(f"config.json has topk_method {method}, which is not built here")
    return {}


def _write_method(shape: ModelShape) -> dict[str, Any]:
    is_limited = shape.moe_router_num_groups is not None
    method = "group_limited_greedy" if is_limited else "greedy"
    return {"topk_method": method, **_GROUPS.write(shape)}


_GROUPS = groups(1)

# Experts are scored by a softmax.
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    always={
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
    },
    fields=(
        *_FIELDS,
        Field(_read_method, _write_method),
        demand("norm_topk_prob", False),
        demand("scoring_func", "softmax"),
        demand("mlp_bias", False),
    ),
    outside=LLAMA_OUTSIDE,
    layer=_LAYER,
)

_AHEAD = "num_nextn_predict_layers"


def _read_ahead(config: Config) -> dict[str, Any]:
    return {"mtp_num_layers": config.get(_AHEAD) or None}


# Sigmoid scores, and a bias on them that balances the load.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    always={
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
    fields=(
        *_FIELDS,
        groups(2),
        demand("norm_topk_prob", True),
        demand("scoring_func", "sigmoid"),
        demand("topk_method", "noaux_tc"),
        demand("rope_interleave", True),
        Field(_read_ahead, lambda shape: {_AHEAD: shape.mtp_num_layers or 0}),
    ),
    outside=LLAMA_OUTSIDE,
    layer={**_LAYER, "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"},
    ahead={
        **{name: name for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")},
        "final_layernorm.weight": "shared_head.norm.weight",
    },
    copies={
        "embedding.word_embeddings.weight": "embed_tokens.weight",
        "output_layer.weight": "shared_head.head.weight",
    },
)
