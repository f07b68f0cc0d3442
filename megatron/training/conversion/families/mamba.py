"""Mamba-2, mixers alone; Nemotron-H, each layer a mixer, attention, an MLP or experts.

Each layer is behind a norm.  Positions of Mamba-2 are in the order of the scan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.experts import TOPK, WIDTH, groups
from megatron.training.conversion.families.fields import activation, demand, same, tied
from megatron.training.conversion.family import Config, Family, Field
from megatron.training.conversion.shape import ENDLESS, ModelShape
from megatron.training.conversion.tensors import Rule


def _read_depth(config: Config) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    return {"num_layers": count, "pattern": "M" * count}


def _read_limit(config: Config) -> dict[str, Any]:
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    high = float(high["__float__"]) if isinstance(high, Mapping) else high
    if (low, high) != (0, float("inf")):
        raise CheckpointError(
            f"config.json has time_step_limit {[low, high]}: only steps without limits are built"
        )
    return {}


# Steps without limits.
_LIMIT = Field(_read_limit, lambda shape: {})


def _write_width(shape: ModelShape) -> dict[str, Any]:
    return {"expand": shape.dims["i"] // shape.hidden_size}


def _read_width(config: Config) -> dict[str, Any]:
    asked = int(config.get("expand", 2) * config["hidden_size"])
    inner = config.get("num_heads", 128) * config.get("head_dim", 64)
    if inner != asked:
        raise CheckpointError(
            f"config.json has expand {config.get('expand', 2)}, a width of {asked}: its heads are "
            f"{inner} wide"
        )
    return {}


_ALWAYS: Mapping[str, Any] = {"kind": "mamba", "position_embedding_type": "none"}
_OUTSIDE: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_norm.weight": "backbone.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
}
_MIXER = "in_proj.weight conv1d.weight conv1d.bias A_log D dt_bias norm.weight out_proj.weight"
_LAYER: Mapping[str, str | Rule] = {
    "norm.weight": "norm.weight",
    **{f"mixer.{name}": f"mixer.{name}" for name in _MIXER.split()},
}
# What a mixer of ours always is.
_PLAIN = (
    demand("use_bias", False),
    demand("use_conv_bias", True),
    demand("conv_kernel", 4),
    _LIMIT,
)

MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    always={
        **_ALWAYS,
        "num_attention_heads": 1,
        "ffn_hidden_size": 0,
        "max_position_embeddings": ENDLESS,
    },
    fields=(
        Field(_read_depth, lambda shape: {"num_hidden_layers": shape.num_layers}),
        same("hidden_size", "hidden_size"),
        same("vocab_size", "vocab_size"),
        same("state_size", "mamba_state_dim", 128),
        same("head_dim", "mamba_head_dim", 64),
        same("num_heads", "mamba_num_heads", 128),
        same("n_groups", "mamba_num_groups", 8),
        same("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Field(_read_width, _write_width),
        demand("hidden_act", "silu"),
        tied(False),
        *_PLAIN,
    ),
    outside=_OUTSIDE,
    layer_prefix="backbone.layers.{}.",
    layer=_LAYER,
)

_SYMBOLS = {
    **{"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"},
    **{"mamba": "M", "attention": "*"},  # as older files call them
}
_NAMES = {symbol: name for name, symbol in reversed(_SYMBOLS.items())}


def _read_pattern(config: Config) -> dict[str, Any]:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if kinds:
        pattern = "".join(_SYMBOLS.get(kind, "?") for kind in kinds)
    if not pattern or set(pattern) - set(_NAMES):
        raise CheckpointError(
            f"config.json has layers {kinds or pattern}: there are {', '.join(_NAMES.values())}"
        )
    return {"num_layers": len(pattern), "pattern": pattern}


def _write_pattern(shape: ModelShape) -> dict[str, Any]:
    return {
        "layers_block_type": [_NAMES[symbol] for symbol in shape.pattern],
        "hybrid_override_pattern": shape.pattern,
        "num_hidden_layers": shape.num_layers,
    }


def _read_experts(config: Config) -> dict[str, Any]:
    if "E" not in _read_pattern(config)["pattern"]:
        return {}
    out: dict[str, Any] = {}
    for each in _EXPERTS:
        out |= each.read(config)
    if config.get("n_shared_experts", 1) != 1 or config.get("moe_latent_size") is not None:
        raise CheckpointError(
            f"config.json has n_shared_experts {config.get('n_shared_experts', 1)} and "
            f"moe_latent_size {config.get('moe_latent_size')}: only 1 and null can be converted"
        )
    return out | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }


def _write_experts(shape: ModelShape) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for each in _EXPERTS if shape.num_experts else ():
        out |= each.write(shape)
    return out


_EXPERTS = (
    same("n_routed_experts", "num_experts"),
    same("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    same("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
    demand("norm_topk_prob", True),
    groups(2),
    TOPK,
    WIDTH,
)


def _projections(ours: str, theirs: str) -> dict[str, str]:
    pairs = {"linear_fc1": "up_proj", "linear_fc2": "down_proj"}
    return {f"{ours}.{mine}.weight": f"{theirs}.{its}.weight" for mine, its in pairs.items()}


# transformers takes steps of at least this, which no model was trained with; its logarithm is asked
# for too.
_STEPS = Field(lambda config: {}, lambda shape: {"time_step_min": 1e-20})

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    always={**_ALWAYS, "is_gated": False, "is_tied": False},
    fields=(
        Field(_read_pattern, _write_pattern),
        same("hidden_size", "hidden_size"),
        same("vocab_size", "vocab_size"),
        same("max_position_embeddings", "max_position_embeddings"),
        same("intermediate_size", "ffn_hidden_size"),
        same("num_attention_heads", "num_attention_heads"),
        same("num_key_value_heads", "num_query_groups", None),
        same("head_dim", "kv_channels", None),
        same("ssm_state_size", "mamba_state_dim", 128),
        same("mamba_head_dim", "mamba_head_dim", 64),
        same("mamba_num_heads", "mamba_num_heads", 128),
        same("n_groups", "mamba_num_groups", 8),
        same("layer_norm_epsilon", "norm_epsilon", 1e-5),
        same("attention_dropout", "attention_dropout", 0.0),
        same("hidden_dropout", "hidden_dropout", 0.0),
        Field(_read_experts, _write_experts),
        activation("mlp_hidden_act", "relu2"),
        demand("mamba_hidden_act", "silu"),
        demand("mamba_proj_bias", False),
        demand("attention_bias", False),
        demand("mlp_bias", False),
        demand("tie_word_embeddings", False),
        demand("sliding_window", None),
        demand("num_nextn_predict_layers", 0),
        _STEPS,
        *_PLAIN,
    ),
    outside=_OUTSIDE,
    layer_prefix="backbone.layers.{}.",
    layer={
        **_LAYER,
        "input_layernorm.weight": "norm.weight",
        "pre_mlp_layernorm.weight": "norm.weight",
        "self_attention.linear_qkv.weight": Rule(
            tuple(f"mixer.{letter}_proj.weight" for letter in "qkv"), is_qkv=True
        ),
        "self_attention.linear_proj.weight": "mixer.o_proj.weight",
        **_projections("mlp", "mixer"),
        "mlp.router.weight": "mixer.gate.weight",
        "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
        **_projections("mlp.experts.local_experts.{}", "mixer.experts.{}"),
        **_projections("mlp.shared_experts", "mixer.shared_experts"),
    },
    spellings={"model.embeddings.": "backbone.embeddings.", "model.layers.": "backbone.layers."},
)
