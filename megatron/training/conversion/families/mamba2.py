"""Mamba-2: mixers alone, each behind a norm.  Positions are in the order of the scan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.fields import demand, same, tied
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
LIMIT = Field(_read_limit, lambda shape: {})


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


ALWAYS: Mapping[str, Any] = {"kind": "mamba", "position_embedding_type": "none"}
OUTSIDE: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "backbone.embeddings.weight",
    "decoder.final_norm.weight": "backbone.norm_f.weight",
    "output_layer.weight": "lm_head.weight",
}
_MIXER = "in_proj.weight conv1d.weight conv1d.bias A_log D dt_bias norm.weight out_proj.weight"
LAYER: Mapping[str, str | Rule] = {
    "norm.weight": "norm.weight",
    **{f"mixer.{name}": f"mixer.{name}" for name in _MIXER.split()},
}
# What a mixer of ours always is.
PLAIN = (
    demand("use_bias", False),
    demand("use_conv_bias", True),
    demand("conv_kernel", 4),
    LIMIT,
)

MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    always={
        **ALWAYS,
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
        *PLAIN,
    ),
    outside=OUTSIDE,
    layer_prefix="backbone.layers.{}.",
    layer=LAYER,
)
