"""T5, the original (ReLU, tied, output scaled) and 1.1 (gated GELU, separate output layer).

In theirs, the first layer of each stack holds its relative position embedding.  Attention scores
are not scaled.
"""

from __future__ import annotations

import re

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.family import (
    ACTIVATIONS,
    Config,
    Family,
    Field,
    Names,
    Values,
    alike,
    demand,
    same,
)
from megatron.training.conversion.shape import ENDLESS, ModelShape
from megatron.training.conversion.tensors import Rule

_ACTIVATIONS = {**ACTIVATIONS, "relu": "relu"}
_PROJ = "feed_forward_proj"
_HALVES = ("encoder", "decoder")
_BIAS = "relative_attention_bias.weight"
_PLACE = "{}.block.0.layer.0.SelfAttention."


def _read_mlp(config: Config) -> Values:
    found = config.get(_PROJ, "relu")
    name = found.removeprefix("gated-")
    name = "gelu_new" if found == "gated-gelu" else name
    if name not in (ACTIVATIONS if found.startswith("gated-") else _ACTIVATIONS):
        raise CheckpointError(f"config.json has {_PROJ} {found}, which is not built here")
    return {"activation": _ACTIVATIONS[name], "is_gated": found.startswith("gated-")}


def _write_mlp(shape: ModelShape) -> Values:
    names = {"gelu_tanh": "gelu" if shape.is_gated else "gelu_new", "squared_relu": "relu2"}
    name = names.get(shape.activation, shape.activation)
    return {_PROJ: f"gated-{name}" if shape.is_gated else name}


def _read_ends(config: Config) -> Values:
    is_tied = config.get("tie_word_embeddings", True)
    is_scaled = config.get("scale_decoder_outputs", is_tied)
    return {"is_tied": is_tied, "output_scale": config["d_model"] ** -0.5 if is_scaled else 1.0}


def _elsewhere(name: str, shape: ModelShape) -> Rule | None:
    """Return the rule of a gated MLP's first matrix, which joins wi_0 and wi_1; else None."""
    found = re.fullmatch(r"(\w+)\.layers\.(\d+)\.mlp\.linear_fc1\.weight", name)
    if found is None or not shape.is_gated:
        return None
    place = f"{found[1]}.block.{found[2]}.layer.{1 + _HALVES.index(found[1])}.DenseReluDense"
    return Rule((f"{place}.wi_0.weight", f"{place}.wi_1.weight"))


_SELF, _CROSS = "layer.0.SelfAttention", "layer.1.EncDecAttention"


def _mlp(stack: str, number: int) -> Names:
    return {
        f"{stack}.pre_mlp_layernorm": f"layer.{number}.layer_norm",
        f"{stack}.mlp.linear_fc1": f"layer.{number}.DenseReluDense.wi",
        f"{stack}.mlp.linear_fc2": f"layer.{number}.DenseReluDense.wo",
    }


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    always={
        "kind": "t5",
        "position_embedding_type": "relative",
        "max_position_embeddings": ENDLESS,
        "softmax_scale": 1.0,
    },
    fields=(
        same("num_layers", "num_layers"),
        same("num_decoder_layers", "decoder_num_layers", lambda config: config["num_layers"]),
        same("d_model", "hidden_size"),
        same("d_kv", "kv_channels"),
        same("d_ff", "ffn_hidden_size"),
        same("num_heads", "num_attention_heads"),
        *alike("vocab_size"),
        same("relative_attention_num_buckets", "relative_attention_num_buckets", 32),
        same("relative_attention_max_distance", "relative_attention_max_distance", 128),
        same("layer_norm_epsilon", "norm_epsilon", 1e-6),
        same("dropout_rate", "attention_dropout", 0.1),
        same("dropout_rate", "hidden_dropout", 0.1),
        Field(_read_mlp, _write_mlp),
        Field(
            _read_ends,
            lambda shape: {
                "tie_word_embeddings": shape.is_tied,
                "scale_decoder_outputs": shape.output_scale != 1,
            },
        ),
        demand(is_encoder_decoder=True),
    ),
    outside={
        "embedding.word_embeddings": "shared",
        **{f"{half}_relative_pos_emb.{_BIAS}": _PLACE.format(half) + _BIAS for half in _HALVES},
        **{f"{half}.final_layernorm": f"{half}.final_layer_norm" for half in _HALVES},
        "lm_head.output_layer": "lm_head",
    },
    layer_prefix="{stack}.block.{}.",
    layer={
        "input_layernorm": "layer.0.layer_norm",
        "self_attention.linear_qkv": Rule(tuple(f"{_SELF}.{x}" for x in "qkv"), is_qkv=True),
        "self_attention.linear_proj": f"{_SELF}.o",
        "pre_cross_attn_layernorm": "layer.1.layer_norm",
        "cross_attention.linear_q": f"{_CROSS}.q",
        "cross_attention.linear_kv": Rule((f"{_CROSS}.k", f"{_CROSS}.v"), is_qkv=True),
        "cross_attention.linear_proj": f"{_CROSS}.o",
        **_mlp("encoder", 1),
        **_mlp("decoder", 2),
    },
    elsewhere=_elsewhere,
    repeats={f"{half}.embed_tokens.weight": "embedding.word_embeddings.weight" for half in _HALVES},
    no_weights=("block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
