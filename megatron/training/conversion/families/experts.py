"""Mixture of experts: config.json entries, tensor names, and families with experts.

gpt-oss has sinks, windows in every other layer, YaRN, and experts with biases and clamped gates.
The experts of a layer are one tensor [E, in, out], in which outputs of the gate and of the up
projection alternate.  Published models store it in mxfp4 (`quantized`), which is read, not written.

DeepSeek V2 and V3 have latent attention, experts and shared experts, and dense layers first.
"""

from __future__ import annotations

from dataclasses import replace
from operator import not_
from typing import Any

import torch

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.llama import LAYER, NO_BIAS, SILU, llama_like
from megatron.training.conversion.family import (
    HEAD_DIM,
    LLAMA_OUTSIDE,
    ROPE,
    SCALED_QUERIES,
    SIZES,
    Config,
    Convert,
    Family,
    Field,
    Names,
    Values,
    activation,
    alike,
    demand,
    rope_of,
    rope_with,
    same,
    tied,
    windows,
)
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule

TOPK = same("num_experts_per_tok", "moe_router_topk")
WIDTH = same("moe_intermediate_size", "moe_ffn_hidden_size")


def gated(ours: str, theirs: str, gate: str, up: str, down: str) -> Names:
    """Return the names of a gated MLP's matrices."""
    return {
        f"{ours}.linear_fc1": Rule((f"{theirs}.{gate}", f"{theirs}.{up}")),
        f"{ours}.linear_fc2": f"{theirs}.{down}",
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERT_LAYER: Names = {
    "mlp.router": "mlp.gate",
    **gated("mlp.experts.local_experts.{}", "mlp.experts.{}", *PROJECTIONS),
}

# norm_topk_prob: true is a softmax over the chosen experts (weights sum to 1), false over all.
NORMED = same("norm_topk_prob", "moe_router_pre_softmax", False, not_, not_)
NORMED_BY_DEFAULT = same("norm_topk_prob", "moe_router_pre_softmax", True, not_, not_)
# Factor of the weights of the chosen experts.
SCALED = same(
    "routed_scaling_factor",
    "moe_router_topk_scaling_factor",
    1.0,
    write=lambda factor: factor or 1.0,
)


def _read_sparse(config: Config) -> Values:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return {"expert_layers": tuple(i not in dense and (i + 1) % step == 0 for i in layers)}


SPARSE = Field(
    _read_sparse,
    lambda shape: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            i for i, has_experts in enumerate(shape.expert_layers) if not has_experts
        ],
    },
)
# Layers without experts come first.
FIRST_DENSE = Field(
    lambda config: {
        "expert_layers": tuple(
            i >= config.get("first_k_dense_replace", 0) for i in range(config["num_hidden_layers"])
        )
    },
    lambda shape: {"first_k_dense_replace": [*shape.expert_layers, True].index(True)},
)


def shared(count: str) -> Field:
    """Convert the number of shared experts, each as wide as another expert."""
    return Field(
        lambda config: {
            "moe_shared_expert_intermediate_size": config[count] * config["moe_intermediate_size"]
            or None
        },
        lambda shape: {
            count: (shape.moe_shared_expert_intermediate_size or 0)
            // (shape.moe_ffn_hidden_size or 1)
        },
    )


def groups(counted: int) -> Field:
    """Convert group-limited routing; a group's score is that of its ``counted`` best experts."""

    return Field(
        lambda config: {
            "moe_router_num_groups": config.get("n_group") or 1,
            "moe_router_group_topk": config.get("topk_group") or 1,
            "moe_router_group_score_topk": counted,
        },
        lambda shape: {
            "n_group": shape.moe_router_num_groups or 1,
            "topk_group": shape.moe_router_group_topk or 1,
        },
    )


SOFTMAX: Values = {"moe_router_score_function": "softmax"}

# Every layer has experts; intermediate_size is the width of an expert.
_IN_ALL = Field(
    lambda config: {
        "moe_ffn_hidden_size": config["intermediate_size"],
        "expert_layers": (True,) * config["num_hidden_layers"],
    }
)
IN_ALL_LAYERS = (same("num_local_experts", "num_experts"), TOPK, _IN_ALL)
MIXTRAL = llama_like(
    "mixtral",
    "Mixtral",
    *SILU,
    HEAD_DIM,
    windows(),
    *IN_ALL_LAYERS,
    epsilon=1e-5,
    layer={
        "mlp.router": "block_sparse_moe.gate",
        **gated("mlp.experts.local_experts.{}", "block_sparse_moe.experts.{}", "w1", "w3", "w2"),
    },
    always=SOFTMAX,
)


QWEN_MOE = (*SILU, TOPK, WIDTH, NORMED, SPARSE)
SHARED_EXPERT_LAYER: Names = {
    **EXPERT_LAYER,
    **gated("mlp.shared_experts", "mlp.shared_expert", *PROJECTIONS),
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
}

# Qwen 2 with experts and a gated shared expert.
QWEN2_MOE = llama_like(
    "qwen2_moe",
    "Qwen2Moe",
    *QWEN_MOE,
    # Even layers below max_window_layers have a window.
    windows(
        lambda c, layer: layer % 2 == 0 and layer < c.get("max_window_layers", 28),
        switch=True,
        default=4096,
    ),
    demand(qkv_bias=True),
    same("num_experts", "num_experts", 60),
    same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    layer=SHARED_EXPERT_LAYER,
    always={**SOFTMAX, "add_qkv_bias": True, "moe_shared_expert_gate": True},
)


def _read_count(config: Config) -> Values:
    """Read num_experts of published models, or num_local_experts of transformers 5.23."""
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        raise CheckpointError("config.json has no num_experts")
    return {"num_experts": count}


_COUNT = Field(_read_count, lambda shape: {"num_experts": shape.num_experts})

# Qwen 3 with experts, and a window in every layer or in none.
QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3Moe",
    *QWEN_MOE,
    HEAD_DIM,
    windows(switch=True, default=4096),
    NO_BIAS,
    _COUNT,
    layer=EXPERT_LAYER,
    always={**SOFTMAX, "qk_norm": "head"},
)

# QK norms over all heads together.
OLMOE = llama_like(
    "olmoe",
    "Olmoe",
    *SILU,
    *(_COUNT, TOPK, _IN_ALL, NORMED),
    NO_BIAS,
    demand(clip_qkv=None),
    epsilon=1e-5,
    layer=EXPERT_LAYER,
    always={**SOFTMAX, "qk_norm": "wide"},
)

# Sigmoid scores, and a bias on them that balances the load.
BALANCED: Values = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def _read_width_of_rotation(config: Config) -> Values:
    """Read RoPE entries, of which published models have ``rotary_dim``."""
    part = config.get("rotary_dim", config["head_dim"]) / config["head_dim"]
    return rope_with(5e6, part).read(config)


MINIMAX_M2 = llama_like(
    "minimax_m2",
    "MiniMaxM2",
    *SILU,
    HEAD_DIM,
    *IN_ALL_LAYERS,
    layer={**MIXTRAL.layer, "mlp.router.expert_bias": "block_sparse_moe.e_score_correction_bias"},
    always={**BALANCED, "qk_norm": "wide"},
    rope=Field(_read_width_of_rotation, ROPE.write),
)


def _read_range(config: Config) -> Values:
    count = config["num_hidden_layers"]
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    step = config.get("moe_layer_interval", 1)
    chosen = range(first, (count - 1 if last == -1 else last) + 1)
    return {"expert_layers": tuple(i in chosen and (i + 1) % step == 0 for i in range(count))}


# Neighboring channels rotate; scores of all experts by a softmax, and a bias on them.
ERNIE_MOE = llama_like(
    "ernie4_5_moe",
    "Ernie4_5_Moe",
    activation("hidden_act", "silu"),
    tied(True),
    same("moe_num_experts", "num_experts"),
    same("moe_k", "moe_router_topk"),
    WIDTH,
    Field(
        _read_range,
        lambda shape: {
            "moe_layer_start_index": [*shape.expert_layers, True].index(True),
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        },
    ),
    shared("moe_num_shared_experts"),
    demand(use_bias=False),
    epsilon=1e-5,
    layer={
        **EXPERT_LAYER,
        **gated("mlp.shared_experts", "mlp.shared_experts", *PROJECTIONS),
        "mlp.router.expert_bias": Rule(("mlp.moe_statics.e_score_correction_bias",), view=(1, -1)),
    },
    always={
        **SOFTMAX,
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
        "rotary_interleaved": True,
    },
    rope=rope_with(5e5),
)


def _equal(name: str) -> Convert:
    """Return a conversion of ``name``, a number or a list that has it for each layer."""

    def read(value: Any) -> object:
        values = {*value} if isinstance(value, list) else {value}
        if len(values) != 1:
            raise CheckpointError(
                f"config.json has {name} {value}: only equal values in all layers can be converted"
            )
        return values.pop()

    return read


def _read_fixed_ntk(config: Config) -> Values:
    """Read RoPE entries; ``alpha`` means another base, which float32 represents by an integer."""
    rope = rope_of(config)
    if not rope.get("alpha") or rope["rope_type"] != "dynamic":
        return ROPE.read(config)
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = rope["rope_theta"] * rope["alpha"] ** (width / (width - 2))
    return ROPE.read({"rope_theta": float(torch.tensor(base, dtype=torch.float32))})


# Norms of queries and keys after the rotary embedding; a shared expert as wide as the others.
HUNYUAN_MOE = llama_like(
    "hunyuan_v1_moe",
    "HunYuanMoEV1",
    *SILU,
    HEAD_DIM,
    NO_BIAS,
    same("num_experts", "num_experts", read=_equal("num_experts")),
    same("moe_topk", "moe_router_topk", read=_equal("moe_topk")),
    _IN_ALL,
    Field(lambda config: {"moe_shared_expert_intermediate_size": config["intermediate_size"]}),
    epsilon=1e-5,
    layer={
        **EXPERT_LAYER,
        **gated("mlp.shared_experts", "mlp.shared_mlp", *PROJECTIONS),
        "mlp.router": "mlp.gate.wg",
        "self_attention.q_layernorm": "self_attn.query_layernorm",
        "self_attention.k_layernorm": "self_attn.key_layernorm",
    },
    always={
        **SOFTMAX,
        "qk_norm": "head",
        "qk_layernorm_after_rope": True,
        "moe_router_dtype": "fp32",
    },
    rope=Field(_read_fixed_ntk, ROPE.write),
)

_EXPERT = "mlp.experts.local_experts.{}."


GPT_OSS = llama_like(
    "gpt_oss",
    "GptOss",
    HEAD_DIM,
    tied(False),
    windows(lambda config, layer: layer % 2 == 0, default=128),
    *IN_ALL_LAYERS,
    same("swiglu_limit", "activation_func_clamp_value", 7.0, float),
    demand(
        attention_bias=True,
        hidden_act="silu",
        swiglu_alpha=1.702,
    ),
    epsilon=1e-5,
    layer={
        "self_attention.core_attention.softmax_offset": "self_attn.sinks",
        "mlp.router": "mlp.router",
        f"{_EXPERT}linear_fc1.weight": Rule(
            ("mlp.experts.gate_up_proj.{}",), transposed=True, by_turns=True
        ),
        f"{_EXPERT}linear_fc1.bias": Rule(("mlp.experts.gate_up_proj_bias.{}",), by_turns=True),
        f"{_EXPERT}linear_fc2.weight": Rule(("mlp.experts.down_proj.{}",), transposed=True),
        f"{_EXPERT}linear_fc2.bias": "mlp.experts.down_proj_bias.{}",
    },
    stacked=tuple(
        f"mlp.experts.{name}_proj{kind}" for name in ("gate_up", "down") for kind in ("", "_bias")
    ),
    always={
        "activation": "quick_gelu",
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "moe_router_score_function": "softmax",
    },
)


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


LATENT_ROPE = Field(_read_rope, _write_rope)
FIXED_EPSILON = demand(rms_norm_eps=1e-6)  # the only epsilon of latent norms in transformers
LATENT_FIELDS = (
    *SIZES,
    same("attention_dropout", "attention_dropout", 0.0),
    LATENT_ROPE,
    same("rms_norm_eps", "norm_epsilon", 1e-6),
    FIXED_EPSILON,
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
    shared("n_shared_experts"),
    FIRST_DENSE,
    SCALED,
    demand(moe_layer_freq=1),
)
LATENT: Values = {
    "multi_latent_attention": True,
    "qk_norm": "latent",
    "moe_router_dtype": "fp32",
}
LATENT_LAYER: Names = {
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


def _write_rope_of_part(shape: ModelShape) -> Values:
    """Write RoPE entries; transformers counts the rotated channels as a part of each head."""
    written = SCALED_QUERIES.write(shape)["rope_parameters"]
    part = (shape.qk_pos_emb_head_dim or 0) / shape.kv_channels
    return {"rope_parameters": {**written, "partial_rotary_factor": part}}


_ROPE_OF_PART = Field(
    lambda config: {**SCALED_QUERIES.read(config), **_read_rope(config)}, _write_rope_of_part
)


_GROUPS = groups(1)

# Experts are scored by a softmax.
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    always={
        **LATENT,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    },
    fields=(
        *LATENT_FIELDS,
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
    layer=LATENT_LAYER,
)

_PREDICTS_AHEAD = same(
    "num_nextn_predict_layers",
    "mtp_num_layers",
    0,
    lambda count: count or None,
    lambda count: count or 0,
)
_BIAS_OF_EXPERTS = {"mlp.router.expert_bias": "mlp.gate.e_score_correction_bias"}

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    always={**LATENT, **BALANCED},
    fields=(
        *LATENT_FIELDS,
        groups(2),
        demand(
            norm_topk_prob=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            rope_interleave=True,
        ),
        _PREDICTS_AHEAD,
    ),
    outside=LLAMA_OUTSIDE,
    layer={**LATENT_LAYER, **_BIAS_OF_EXPERTS},
    ahead={
        **{name: name for name in ("enorm", "hnorm", "eh_proj")},
        "final_layernorm": "shared_head.norm",
    },
    copies={
        "embedding.word_embeddings.weight": "embed_tokens.weight",
        "output_layer.weight": "shared_head.head.weight",
    },
)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")

# Rotation of half of each head, norms of each head's queries and keys in some sizes.
GLM4_MOE = replace(
    llama_like(
        "glm4_moe",
        "Glm4Moe",
        *SILU,
        HEAD_DIM,
        same("attention_bias", "add_qkv_bias", False),
        same(
            "use_qk_norm",
            "qk_norm",
            False,
            lambda has: "head" if has else None,
            lambda norm: norm is not None,
        ),
        same("n_routed_experts", "num_experts"),
        *(TOPK, WIDTH, shared("n_shared_experts"), FIRST_DENSE, SCALED, groups(2)),
        demand(norm_topk_prob=True),
        _PREDICTS_AHEAD,
        epsilon=1e-5,
        layer={
            **EXPERT_LAYER,
            **gated("mlp.shared_experts", "mlp.shared_experts", *PROJECTIONS),
            **_BIAS_OF_EXPERTS,
        },
        always={**BALANCED, "moe_router_dtype": "fp32"},
        rope=rope_with(part=0.5),
    ),
    ahead=DEEPSEEK_V3.ahead,
    copies=DEEPSEEK_V3.copies,
)

# As DeepSeek V3 with softmax scores; the experts of a layer are one tensor [E, out, in].
MISTRAL4 = Family(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    always={**LATENT, **SOFTMAX, "moe_router_dtype": None},
    fields=(
        *(_ROPE_OF_PART if each is LATENT_ROPE else each for each in LATENT_FIELDS),
        NORMED_BY_DEFAULT,
        demand(rope_interleave=True, n_group=1, topk_group=1),
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **LATENT_LAYER,
        f"{_EXPERT}linear_fc1.weight": "mlp.experts.gate_up_proj.{}",
        f"{_EXPERT}linear_fc2.weight": "mlp.experts.down_proj.{}",
    },
    stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
