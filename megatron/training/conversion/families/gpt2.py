"""GPT-2: learned positions, biases everywhere, matrices stored as [in, out]."""

from __future__ import annotations

from megatron.training.conversion.families.fields import activation, demand, same, tied
from megatron.training.conversion.family import Family
from megatron.training.conversion.tensors import Rule

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
        same("n_inner", "ffn_hidden_size", lambda config: 4 * config["n_embd"]),
        activation("activation_function", "gelu_new"),
        tied(True),
        demand("scale_attn_weights", True),
        demand("scale_attn_by_inverse_layer_idx", False),
        demand("add_cross_attention", False),
    ),
    outside={
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    },
    layer_prefix="transformer.h.{}.",
    layer={
        "input_layernorm": "ln_1",
        "self_attention.linear_qkv": Rule(("attn.c_attn",), is_qkv=True, transposed=True),
        "self_attention.linear_proj": Rule(("attn.c_proj",), transposed=True),
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": Rule(("mlp.c_fc",), transposed=True),
        "mlp.linear_fc2": Rule(("mlp.c_proj",), transposed=True),
    },
    no_weights=(".attn.bias", ".attn.masked_bias"),
)
