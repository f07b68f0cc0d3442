"""T5, the original (ReLU, tied, output scaled) and 1.1 (gated GELU, an output layer of its own).

A half's relative positions are in its first layer in theirs.  Scores are not scaled.
"""

from __future__ import annotations

import re
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.fields import ACTIVATIONS, demand, same
from megatron.training.conversion.family import Config, Family, Field
from megatron.training.conversion.shape import ENDLESS, ModelShape
from megatron.training.conversion.tensors import Rule

_ACTIVATIONS = {**ACTIVATIONS, "relu": "relu"}
_PROJ = "feed_forward_proj"
_HALVES = ("encoder", "decoder")
_BIAS = "relative_attention_bias.weight"
_PLACE = "{}.block.0.layer.0.SelfAttention."


def _read_mlp(config: Config) -> dict[str, Any]:
    found = config.get(_PROJ, "relu")
    name = found.removeprefix("gated-")
    name = "gelu_new" if found == "gated-gelu" else name
    if name not in (ACTIVATIONS if found.startswith("gated-") else _ACTIVATIONS):
        raise CheckpointError(f"config.json has {_PROJ} {found}, which is not built here")
    return {"activation": _ACTIVATIONS[name], "is_gated": found.startswith("gated-")}


def _write_mlp(shape: ModelShape) -> dict[str, Any]:
    names = {"gelu_tanh": "gelu" if shape.is_gated else "gelu_new", "squared_relu": "relu2"}
    name = names.get(shape.activation, shape.activation)
    return {_PROJ: f"gated-{name}" if shape.is_gated else name}


def _read_ends(config: Config) -> dict[str, Any]:
    is_tied = config.get("tie_word_embeddings", True)
    is_scaled = config.get("scale_decoder_outputs", is_tied)
    return {"is_tied": is_tied, "output_scale": config["d_model"] ** -0.5 if is_scaled else 1.0}


def _write_ends(shape: ModelShape) -> dict[str, Any]:
    return {"tie_word_embeddings": shape.is_tied, "scale_decoder_outputs": shape.output_scale != 1}


def _read_decoder(config: Config) -> dict[str, Any]:
    return {"decoder_num_layers": config.get("num_decoder_layers") or config["num_layers"]}


def _elsewhere(name: str, shape: ModelShape) -> Rule | None:
    """A gated MLP: both halves of the first matrix."""
    found = re.fullmatch(r"(\w+)\.layers\.(\d+)\.mlp\.linear_fc1\.weight", name)
    if found is None or not shape.is_gated:
        return None
    place = f"{found[1]}.block.{found[2]}.layer.{1 + _HALVES.index(found[1])}.DenseReluDense"
    return Rule((f"{place}.wi_0.weight", f"{place}.wi_1.weight"))


def _attention(ours: str, theirs: str) -> dict[str, Rule]:
    parts = {"qkv": "qkv"} if ours == "self_attention" else {"q": "q", "kv": "kv"}
    return {
        f"{ours}.linear_{name}.weight": Rule(
            tuple(f"{theirs}.{letter}.weight" for letter in letters), is_qkv=len(letters) > 1
        )
        for name, letters in {**parts, "proj": "o"}.items()
    }


def _mlp(stack: str, number: int) -> dict[str, str]:
    return {
        f"{stack}.pre_mlp_layernorm.weight": f"layer.{number}.layer_norm.weight",
        f"{stack}.mlp.linear_fc1.weight": f"layer.{number}.DenseReluDense.wi.weight",
        f"{stack}.mlp.linear_fc2.weight": f"layer.{number}.DenseReluDense.wo.weight",
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
        Field(_read_decoder, lambda shape: {"num_decoder_layers": shape.decoder_num_layers}),
        same("d_model", "hidden_size"),
        same("d_kv", "kv_channels"),
        same("d_ff", "ffn_hidden_size"),
        same("num_heads", "num_attention_heads"),
        same("vocab_size", "vocab_size"),
        same("relative_attention_num_buckets", "relative_attention_num_buckets", 32),
        same("relative_attention_max_distance", "relative_attention_max_distance", 128),
        same("layer_norm_epsilon", "norm_epsilon", 1e-6),
        same("dropout_rate", "attention_dropout", 0.1),
        same("dropout_rate", "hidden_dropout", 0.1),
        Field(_read_mlp, _write_mlp),
        Field(_read_ends, _write_ends),
        demand("is_encoder_decoder", True),
    ),
    outside={
        "embedding.word_embeddings.weight": "shared.weight",
        **{f"{half}_relative_pos_emb.{_BIAS}": _PLACE.format(half) + _BIAS for half in _HALVES},
        **{f"{half}.final_layernorm.weight": f"{half}.final_layer_norm.weight" for half in _HALVES},
        "lm_head.output_layer.weight": "lm_head.weight",
    },
    layer_prefix="{stack}.block.{}.",
    layer={
        "input_layernorm.weight": "layer.0.layer_norm.weight",
        **_attention("self_attention", "layer.0.SelfAttention"),
        "pre_cross_attn_layernorm.weight": "layer.1.layer_norm.weight",
        **_attention("cross_attention", "layer.1.EncDecAttention"),
        **_mlp("encoder", 1),
        **_mlp("decoder", 2),
    },
    elsewhere=_elsewhere,
    repeats={f"{half}.embed_tokens.weight": "embedding.word_embeddings.weight" for half in _HALVES},
    no_weights=("block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
