"""GPT-2: learned positions, biases everywhere, matrices stored as [in, out]."""

from __future__ import annotations

from typing import Any

from megatron.training.conversion.families.fields import activation, demand, same, tied
from megatron.training.conversion.family import Config, Family, Field
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule


def _read_width(config: Config) -> dict[str, Any]:
    return {"ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"]}


def _write_width(shape: ModelShape) -> dict[str, Any]:
    is_default = shape.ffn_hidden_size == 4 * shape.hidden_size
    return {"n_inner": None if is_default else shape.ffn_hidden_size}


def _both(ours: str, theirs: str, *, is_qkv: bool = False) -> dict[str, Rule]:
    return {
        f"{ours}.weight": Rule((f"{theirs}.weight",), is_qkv=is_qkv, transposed=True),
        f"{ours}.bias": Rule((f"{theirs}.bias",), is_qkv=is_qkv),
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    always={
        "normalization": "LayerNorm",
        "is_gated": False,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "position_embedding_type": "learned_absolute",
    },
    fields=(
        same("n_layer", "num_layers"),
        same("n_embd", "hidden_size"),
        same("n_head", "num_attention_heads"),
        same("n_positions", "max_position_embeddings"),
        same("vocab_size", "vocab_size"),
        same("layer_norm_epsilon", "norm_epsilon", 1e-5),
        same("attn_pdrop", "attention_dropout", 0.1),
        same("embd_pdrop", "hidden_dropout", 0.1),
        same("resid_pdrop", "hidden_dropout", 0.1),
        Field(_read_width, _write_width),
        activation("activation_function", "gelu_new"),
        tied(True),
        demand("scale_attn_weights", True),
        demand("scale_attn_by_inverse_layer_idx", False),
        demand("add_cross_attention", False),
    ),
    outside={
        "embedding.word_embeddings.weight": "transformer.wte.weight",
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.final_layernorm.weight": "transformer.ln_f.weight",
        "decoder.final_layernorm.bias": "transformer.ln_f.bias",
        "output_layer.weight": "lm_head.weight",
    },
    layer_prefix="transformer.h.{}.",
    layer={
        "input_layernorm.weight": "ln_1.weight",
        "input_layernorm.bias": "ln_1.bias",
        **_both("self_attention.linear_qkv", "attn.c_attn", is_qkv=True),
        **_both("self_attention.linear_proj", "attn.c_proj"),
        "pre_mlp_layernorm.weight": "ln_2.weight",
        "pre_mlp_layernorm.bias": "ln_2.bias",
        **_both("mlp.linear_fc1", "mlp.c_fc"),
        **_both("mlp.linear_fc2", "mlp.c_proj"),
    },
    no_weights=(".attn.bias", ".attn.masked_bias"),
)
