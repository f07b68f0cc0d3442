"""Mamba-2 (only mixers) and Nemotron-H (each layer a mixer, attention, an MLP or experts).

A norm precedes each layer.  There are no position embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.experts import SCALED, TOPK, WIDTH, groups
from megatron.training.conversion.family import (
    HEAD_DIM,
    Config,
    Family,
    Field,
    Names,
    Values,
    activation,
    alike,
    demand,
    same,
    tied,
)
from megatron.training.conversion.shape import ENDLESS, ModelShape
from megatron.training.conversion.tensors import Rule


def _read_limit(config: Config) -> Values:
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    high = float(high["__float__"]) if isinstance(high, Mapping) else high
    if (low, high) != (0, float("inf")):
        raise CheckpointError(
            f"config.json has time_step_limit {[low, high]}: only steps without limits are built"
        )
    return {}


def _read_width(config: Config) -> Values:
    asked = int(config.get("expand", 2) * config["hidden_size"])
    inner = config.get("num_heads", 128) * config.get("head_dim", 64)
    if inner != asked:
        raise CheckpointError(
            f"config.json has expand {config.get('expand', 2)}, a width of {asked}: its heads are "
            f"{inner} wide"
        )
    return {}


def _write_width(shape: ModelShape) -> Values:
    inner = (shape.mamba_num_heads or 0) * (shape.mamba_head_dim or 0)
    return {"expand": inner // shape.hidden_size}


_ALWAYS: Values = {"kind": "mamba", "position_embedding_type": "none"}
_OUTSIDE: Names = {
    "embedding.word_embeddings": "backbone.embeddings",
    "decoder.final_norm": "backbone.norm_f",
    "output_layer": "lm_head",
}
_MIXER = "in_proj conv1d A_log D dt_bias norm out_proj"
_LAYER: Names = {
    "norm": "norm",
    **{f"mixer.{name}": f"mixer.{name}" for name in _MIXER.split()},
}
# Options of which our mixer supports only one setting.
_PLAIN = (
    demand(
        use_bias=False,
        use_conv_bias=True,
        conv_kernel=4,
    ),
    Field(_read_limit),  # steps without limits
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
        same("num_hidden_layers", "num_layers"),
        Field(lambda config: {"pattern": "M" * config["num_hidden_layers"]}),
        *alike("hidden_size", "vocab_size"),
        same("state_size", "mamba_state_dim", 128),
        same("head_dim", "mamba_head_dim", 64),
        same("num_heads", "mamba_num_heads", 128),
        same("n_groups", "mamba_num_groups", 8),
        same("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Field(_read_width, _write_width),
        demand(hidden_act="silu"),
        tied(False),
        *_PLAIN,
    ),
    outside=_OUTSIDE,
    layer_prefix="backbone.layers.{}.",
    layer=_LAYER,
)

_SYMBOLS = {
    **{"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"},
    **{"mamba": "M", "attention": "*"},  # names in older files
}
_NAMES = {symbol: name for name, symbol in reversed(_SYMBOLS.items())}


def _read_pattern(config: Config) -> Values:
    kinds = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if kinds:
        pattern = "".join(_SYMBOLS.get(kind, "?") for kind in kinds)
    if not pattern or set(pattern) - set(_NAMES):
        raise CheckpointError(
            f"config.json has layers {kinds or pattern}: there are {', '.join(_NAMES.values())}"
        )
    return {"num_layers": len(pattern), "pattern": pattern}


def _read_ahead(config: Config) -> Values:
    """Read MTP layers, like transformers: the list of kinds counts unless it is the default."""
    kinds = "".join(_SYMBOLS.get(kind, "?") for kind in config.get("mtp_layers_block_type") or ())
    pattern = config.get("mtp_hybrid_override_pattern")
    if not kinds or (pattern and kinds == _AHEAD):
        kinds = pattern or _AHEAD
    count = config.get("num_nextn_predict_layers") or None
    if count and set(kinds) - set(_NAMES):
        raise CheckpointError(
            f"config.json has MTP layers {kinds}: there are {', '.join(_NAMES.values())}"
        )
    return {"mtp_num_layers": count, "mtp_hybrid_override_pattern": kinds}


def _write_ahead(shape: ModelShape) -> Values:
    kinds = [_NAMES[symbol] for symbol in shape.mtp_hybrid_override_pattern or _AHEAD]
    return {
        "num_nextn_predict_layers": shape.mtp_num_layers or 0,
        "mtp_layers_block_type": kinds,
    }


_AHEAD = "*E"  # the default of the config class


def _read_experts(config: Config) -> Values:
    if "E" not in _read_pattern(config)["pattern"]:
        return {}
    out: dict[str, object] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    }
    for each in _EXPERTS:
        out |= each.read(config)
    return out


def _write_experts(shape: ModelShape) -> Values:
    out: dict[str, object] = {}
    for each in _EXPERTS if shape.num_experts else ():
        out |= each.write(shape)
    return out


_EXPERTS = (
    same("n_routed_experts", "num_experts"),
    *alike("moe_shared_expert_intermediate_size"),
    same("moe_latent_size", "moe_latent_size", None),
    SCALED,
    demand(norm_topk_prob=True),
    Field(demand(n_shared_experts=1).read),
    groups(2),
    TOPK,
    WIDTH,
)


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    always={**_ALWAYS, "is_gated": False, "is_tied": False},
    fields=(
        Field(
            _read_pattern,
            lambda shape: {
                "layers_block_type": [_NAMES[symbol] for symbol in shape.pattern],
                "hybrid_override_pattern": shape.pattern,
                "num_hidden_layers": shape.num_layers,
            },
        ),
        *alike("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads"),
        same("intermediate_size", "ffn_hidden_size"),
        same("num_key_value_heads", "num_query_groups", None),
        HEAD_DIM,
        same("ssm_state_size", "mamba_state_dim", 128),
        same("mamba_head_dim", "mamba_head_dim", 64),
        same("mamba_num_heads", "mamba_num_heads", 128),
        same("n_groups", "mamba_num_groups", 8),
        same("layer_norm_epsilon", "norm_epsilon", 1e-5),
        same("attention_dropout", "attention_dropout", 0.0),
        same("hidden_dropout", "hidden_dropout", 0.0),
        Field(_read_experts, _write_experts),
        activation("mlp_hidden_act", "relu2"),
        demand(
            mamba_hidden_act="silu",
            mamba_proj_bias=False,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
            sliding_window=None,
        ),
        Field(_read_ahead, _write_ahead),
        # transformers clamps steps to this minimum, models are trained without one.  Not 0:
        # transformers also takes its logarithm.
        Field(write=lambda shape: {"time_step_min": 1e-20}),
        *_PLAIN,
    ),
    outside=_OUTSIDE,
    layer_prefix="backbone.layers.{}.",
    layer={
        **_LAYER,
        "input_layernorm": "norm",
        "pre_mlp_layernorm": "norm",
        "self_attention.linear_qkv": Rule(
            tuple(f"mixer.{letter}_proj" for letter in "qkv"), is_qkv=True
        ),
        "self_attention.linear_proj": "mixer.o_proj",
        "mlp.linear_fc1": "mixer.up_proj",
        "mlp.linear_fc2": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.router.expert_bias": "mixer.gate.e_score_correction_bias",
        "mlp.experts.local_experts.{}.linear_fc1": "mixer.experts.{}.up_proj",
        "mlp.experts.local_experts.{}.linear_fc2": "mixer.experts.{}.down_proj",
        "mlp.shared_experts.linear_fc1": "mixer.shared_experts.up_proj",
        "mlp.shared_experts.linear_fc2": "mixer.shared_experts.down_proj",
        **{f"mlp.{name}": f"mixer.{name}" for name in ("fc1_latent_proj", "fc2_latent_proj")},
    },
    ahead={name: name for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")},
    ahead_prefix="mtp.layers.{}.",
    spellings={"model.embeddings.": "backbone.embeddings.", "model.layers.": "backbone.layers."},
)
