"""BERT, with norms as published and with norms as in Megatron-LM.

The published model has a norm after each residual sum.  Ours is equivalent with
--apply-residual-connection-post-layernorm, but the norms belong to other modules: the input norm of
our first layer is the norm of their embeddings, the norm before each MLP is in their attention, and
the input norm of each later layer and the final norm are at the end of their previous layer.
"""

from __future__ import annotations

import re
from dataclasses import replace

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.family import (
    SIZES,
    Config,
    Family,
    Field,
    Names,
    Values,
    demand,
    same,
)
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule

_MOVED = re.compile(r"encoder\.(?:layers\.(\d+)\.input|final)_layernorm\.(weight|bias)")


def _elsewhere(name: str, shape: ModelShape) -> str | None:
    found = _MOVED.fullmatch(name)
    if found is None:
        return None
    before = int(found[1] or shape.num_layers) - 1
    where = f"encoder.layer.{before}.output" if before >= 0 else "embeddings"
    return f"bert.{where}.LayerNorm.{found[2]}"


def _types(model: str, alone: str) -> Field:
    """Convert type_vocab_size: ours has token types only together with the binary head."""

    def read(config: Config) -> Values:
        count = config.get("type_vocab_size", 2)
        if count not in (1, 2):
            raise CheckpointError(
                f"config.json has type_vocab_size {count}: only 1 and 2 can be converted"
            )
        return {"has_binary_head": count == 2}

    return Field(
        read,
        lambda shape: {
            "type_vocab_size": 1 + shape.has_binary_head,
            "architectures": [model if shape.has_binary_head else alone],
        },
    )


_FIELDS = (
    *SIZES,
    same("layer_norm_eps", "norm_epsilon", 1e-12),
    same("attention_probs_dropout_prob", "attention_dropout", 0.1),
    same("hidden_dropout_prob", "hidden_dropout", 0.1),
    demand(
        hidden_act="gelu",  # our LM head supports no other
        position_embedding_type="absolute",
        tie_word_embeddings=True,
        is_decoder=False,
        add_cross_attention=False,
    ),
)
_ALWAYS: Values = {
    "kind": "bert",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "is_gated": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "position_embedding_type": "learned_absolute",
    "is_tied": True,
}
_OUTSIDE: Names = {
    "embedding.word_embeddings": "bert.embeddings.word_embeddings",
    "embedding.position_embeddings": "bert.embeddings.position_embeddings",
    "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "output_layer.weight": "cls.predictions.decoder.weight",
    "output_layer.bias": "cls.predictions.bias",
    "pooler.dense": "bert.pooler.dense",
    "binary_head": "cls.seq_relationship",
}
_LAYER: Names = {
    "self_attention.linear_qkv": Rule(
        tuple(f"attention.self.{part}" for part in ("query", "key", "value")), is_qkv=True
    ),
    "self_attention.linear_proj": "attention.output.dense",
    "mlp.linear_fc1": "intermediate.dense",
    "mlp.linear_fc2": "output.dense",
}
BERT = Family(
    model_type="bert",
    architecture="BertForPreTraining",
    always={**_ALWAYS, "apply_residual_connection_post_layernorm": True},
    fields=(*_FIELDS, _types("BertForPreTraining", "BertForMaskedLM")),
    outside=_OUTSIDE,
    layer_prefix="bert.encoder.layer.{}.",
    layer={**_LAYER, "pre_mlp_layernorm": "attention.output.LayerNorm"},
    elsewhere=_elsewhere,
    repeats={"cls.predictions.decoder.bias": "output_layer.bias"},
    heads=("lm_head.", "output_layer.", "pooler.", "binary_head."),
    # A single token type adds nothing.
    blank=lambda shape: (
        {}
        if shape.has_binary_head
        else {"bert.embeddings.token_type_embeddings.weight": (1, shape.hidden_size)}
    ),
    spellings={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    no_weights=("embeddings.position_ids",),
)

# Norms before attention and before the MLP, and one after the last layer.
MEGATRON_BERT = replace(
    BERT,
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    always=_ALWAYS,
    fields=(*_FIELDS, _types("MegatronBertForPreTraining", "MegatronBertForMaskedLM")),
    outside={**_OUTSIDE, "encoder.final_layernorm": "bert.encoder.ln"},
    layer={**_LAYER, "input_layernorm": "attention.ln", "pre_mlp_layernorm": "ln"},
    elsewhere=lambda name, shape: None,
)
