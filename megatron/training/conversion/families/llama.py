"""Llama 1 to 3, and dense families that are defined by their differences from Llama; GPT-2."""

from __future__ import annotations

import re
from dataclasses import replace

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.family import (
    HEAD_DIM,
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    MROPE,
    ROPE,
    SCALED_QUERIES,
    TWO_ROPES,
    Config,
    Family,
    Field,
    Names,
    Values,
    activation,
    demand,
    mrope,
    rope_with,
    same,
    tied,
    windows,
)
from megatron.training.conversion.shape import ModelShape
from megatron.training.conversion.tensors import Rule

# Layer with norms before attention and MLP; other families reuse its entries.
LAYER: Names = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": Rule(
        tuple(f"self_attn.{letter}_proj" for letter in "qkv"), is_qkv=True
    ),
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": Rule(("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": "mlp.down_proj",
}


def _read_bias(config: Config) -> Values:
    attention, mlp = (bool(config.get(f"{part}_bias", False)) for part in ("attention", "mlp"))
    if attention != mlp:
        raise CheckpointError(
            f"config.json has attention_bias {attention} and mlp_bias {mlp}: "
            "only both or neither can be converted"
        )
    return {"add_bias_linear": mlp, "add_qkv_bias": mlp}


_BIAS = Field(
    _read_bias, lambda shape: dict.fromkeys(("attention_bias", "mlp_bias"), shape.add_bias_linear)
)


def llama_like(
    model_type: str,
    name: str,
    *fields: Field,
    epsilon: float = 1e-6,
    layer: Names | None = None,
    always: Values | None = None,
    stacked: tuple[str, ...] = (),
    rope: Field = ROPE,
) -> Family:
    """Return Llama's family with additional ``fields``; ``layer`` overrides names of tensors."""
    shared = (rope if each is ROPE else each for each in LLAMA_FIELDS)
    return Family(
        model_type=model_type,
        architecture=f"{name}ForCausalLM",
        fields=(*shared, same("rms_norm_eps", "norm_epsilon", epsilon), *fields),
        outside=LLAMA_OUTSIDE,
        layer={**LAYER, **(layer or {})},
        always=always or {},
        stacked=stacked,
    )


SILU = (activation("hidden_act", "silu"), tied(False))
# attention_bias must be false or missing.
NO_BIAS = demand(attention_bias=False)

LLAMA = llama_like("llama", "Llama", *SILU, HEAD_DIM, _BIAS, demand(pretraining_tp=1))

# A sliding window in every layer, or in none.
MISTRAL = llama_like("mistral", "Mistral", *SILU, HEAD_DIM, windows(default=4096))


# Layers from max_window_layers on have a window.
_UPPER_WINDOWS = windows(
    lambda config, layer: layer >= config.get("max_window_layers", 28), switch=True, default=4096
)

# Qwen 2 and 2.5: biases of queries, keys and values, and windows in upper layers.
QWEN2 = llama_like("qwen2", "Qwen2", *SILU, _UPPER_WINDOWS, always={"add_qkv_bias": True})

# The language model of Qwen2-VL: positions have a time, a height and a width.
QWEN2_VL_TEXT = replace(
    QWEN2,
    model_type="qwen2_vl_text",
    architecture="Qwen2VLForConditionalGeneration",
    fields=tuple(MROPE if each is ROPE else each for each in QWEN2.fields),
)
# That of Qwen3-VL, whose time, height and width take turns.
QWEN3_VL_TEXT = llama_like(
    "qwen3_vl_text",
    "Qwen3VL",
    *SILU,
    same("head_dim", "kv_channels", 128),
    NO_BIAS,
    always={"qk_norm": "head"},
    rope=mrope(500000.0, (24, 20, 20)),
)
QWEN2_5_VL_TEXT = replace(QWEN2_VL_TEXT, model_type="qwen2_5_vl_text")

# Norms of each head's queries and keys, and windows in upper layers.
QWEN3 = llama_like(
    "qwen3",
    "Qwen3",
    *SILU,
    same("head_dim", "kv_channels", 128),
    _UPPER_WINDOWS,
    NO_BIAS,
    always={"qk_norm": "head"},
)

# Norm weights stored minus one, gated GELU, scaled embeddings.
_GEMMA: Values = {"apply_layernorm_1p": True, "embedding_scale": 0}  # 0: sqrt(hidden_size)
_GEMMA_FIELDS = (same("head_dim", "kv_channels", 256), tied(True), NO_BIAS)
GEMMA = llama_like(
    "gemma",
    "Gemma",
    *_GEMMA_FIELDS,
    activation("hidden_act", "gelu_pytorch_tanh", "hidden_activation"),
    always=_GEMMA,
)


_NORMS_BEHIND = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}

_NORMS_AROUND = {**_NORMS_BEHIND, "pre_mlp_layernorm": "pre_feedforward_layernorm"}
_SCORE_SCALE = same(
    "query_pre_attn_scalar",
    "softmax_scale",
    256,
    lambda width: float(width**-0.5),
    lambda scale: round(scale**-2),
)

# Gemma with norms before and after each part, soft caps, and a window in every other layer.
GEMMA2 = llama_like(
    "gemma2",
    "Gemma2",
    *_GEMMA_FIELDS,
    activation("hidden_activation", "gelu_pytorch_tanh"),
    same("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
    same("final_logit_softcapping", "final_logit_softcapping", 30.0),
    _SCORE_SCALE,
    windows(lambda config, layer: layer % 2 == 0, default=4096),
    layer=_NORMS_AROUND,
    always={**_GEMMA, "layer_norm_placement": "sandwich"},
)

# As Gemma 2, with norms of each head's queries and keys in place of soft caps of the scores, and
# two bases of the rotary embedding: of layers with a window, and of every sixth, without.
GEMMA3 = llama_like(
    "gemma3_text",
    "Gemma3",
    *_GEMMA_FIELDS,
    activation("hidden_activation", "gelu_pytorch_tanh"),
    _SCORE_SCALE,
    same("attn_logit_softcapping", "attn_logit_softcapping", None),
    same("final_logit_softcapping", "final_logit_softcapping", None),
    demand(use_bidirectional_attention=False),
    windows(
        lambda config, layer: (layer + 1) % config.get("sliding_window_pattern", 6) != 0,
        default=4096,
    ),
    layer=_NORMS_AROUND,
    always={**_GEMMA, "layer_norm_placement": "sandwich", "qk_norm": "head"},
    rope=TWO_ROPES,
)

# One matrix for queries, keys and values, one for gate and up, and LongRoPE.
PHI3 = llama_like(
    "phi3",
    "Phi3",
    *SILU,
    windows(),
    same("resid_pdrop", "hidden_dropout", 0.0),
    same("embd_pdrop", "hidden_dropout", 0.0),
    epsilon=1e-5,
    layer={
        "self_attention.linear_qkv": Rule(("self_attn.qkv_proj",), is_qkv=True),
        "mlp.linear_fc1": "mlp.gate_up_proj",
    },
)

# Norms after attention and after the MLP, and QK norms over all heads together.
OLMO2 = llama_like(
    "olmo2",
    "Olmo2",
    *SILU,
    NO_BIAS,
    epsilon=1e-5,
    layer=_NORMS_BEHIND,
    always={"layer_norm_placement": "post", "qk_norm": "wide"},
)


def _with_base_of_windows(config: Config) -> Config:
    """Return config.json of OLMo 3, whose only base is that of layers with a window too."""
    base = config.get("rope_theta", 5e5)
    return {"rope_theta": base, "rope_local_base_freq": base, **config}


def _write_ropes(shape: ModelShape) -> Values:
    written = {**ROPE.write(shape)}
    bases = {"full_attention": shape.rotary_base, "sliding_attention": shape.window_rotary_base}
    ropes = {
        kind: {"rope_type": "default", "rope_theta": float(base or shape.rotary_base)}
        for kind, base in bases.items()
    }
    ropes["full_attention"] |= written["rope_scaling"] or {}
    return {**written, "rope_parameters": ropes}


# As OLMo 2, with a window in three of four layers, which YaRN does not reach.
OLMO3 = replace(
    llama_like(
        "olmo3",
        "Olmo3",
        *SILU,
        NO_BIAS,
        windows(lambda config, layer: (layer + 1) % 4 != 0, default=4096),
        epsilon=1e-5,
        rope=Field(lambda config: TWO_ROPES.read(_with_base_of_windows(config)), _write_ropes),
    ),
    layer=OLMO2.layer,
    always=OLMO2.always,
)

_ROTATES = "no_rope_layers"  # despite its name 1 stands for a layer with rotary embedding


def _read_rotation(config: Config) -> Values:
    step = config.get("no_rope_layer_interval", 4)
    layers = range(config["num_hidden_layers"])
    rotates = config.get(_ROTATES) or [(layer + 1) % step for layer in layers]
    return {"without_rope": tuple(not rotates[layer] for layer in layers)}


# Every fourth layer has no positions; windows only in such layers.
SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3",
    activation("hidden_act", "silu"),
    tied(True),
    _BIAS,
    windows(lambda config, layer: _read_rotation(config)["without_rope"][layer], switch=True),
    Field(
        _read_rotation,
        lambda shape: {
            _ROTATES: [int(not plain) for plain in shape.without_rope] or [1] * shape.num_layers
        },
    ),
    rope=rope_with(2e6),
)

_EXAONE_WINDOWS = windows(lambda config, layer: not _sees_all(config, layer), default=4096)


def _sees_all(config: Config, layer: int) -> bool:
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        is_last = bool(layer + 1 == config["num_hidden_layers"])
        return is_last or pattern[layer % len(pattern)] == "G"
    return (layer + 1) % int(pattern) == 0


def _read_exaone_windows(config: Config) -> Values:
    read = _EXAONE_WINDOWS.read(config)
    is_mixed = bool(config.get("sliding_window", 4096))
    return {**read, "without_rope": tuple(is_mixed and size is None for size in read["windows"])}


# Norms after attention and after the MLP, and of each head's queries and keys.  A model with
# windows has no positions in the other layers.
EXAONE4 = llama_like(
    "exaone4",
    "Exaone4",
    *SILU,
    HEAD_DIM,
    Field(_read_exaone_windows, _EXAONE_WINDOWS.write),
    epsilon=1e-5,
    layer=_NORMS_BEHIND,
    always={"layer_norm_placement": "post", "qk_norm": "head"},
)

# Neighboring channels rotate, in half of each head; norms before and after each part.
GLM4 = llama_like(
    "glm4",
    "Glm4",
    *SILU,
    same("head_dim", "kv_channels", 128),
    same("attention_bias", "add_qkv_bias", True),
    epsilon=1.5625e-7,
    layer={
        "post_self_attn_layernorm": "post_self_attn_layernorm",
        "mlp.linear_fc1": "mlp.gate_up_proj",
        "post_mlp_layernorm": "post_mlp_layernorm",
    },
    always={"layer_norm_placement": "sandwich", "rotary_interleaved": True},
    rope=rope_with(part=0.5),
)

SEED_OSS = llama_like(
    "seed_oss",
    "SeedOss",
    *SILU,
    same("head_dim", "kv_channels", 128),
    same("attention_bias", "add_qkv_bias", True),
    demand(attention_out_bias=False, mlp_bias=False),
    same("attention_dropout", "attention_dropout", 0.1),
    same("residual_dropout", "hidden_dropout", 0.1),
)


def _invert(scale: float) -> float:
    return round(1 / scale, 12)


# Multipliers of embeddings, scores, outputs of sublayers and logits.
GRANITE = llama_like(
    "granite",
    "Granite",
    *SILU,
    _BIAS,
    same("embedding_multiplier", "embedding_scale", 1.0, float),
    same("attention_multiplier", "softmax_scale", 1.0, float),
    same("residual_multiplier", "residual_scale", 1.0, float),
    same("logits_scaling", "output_scale", 1.0, _invert, _invert),
)

# YaRN, and queries that grow with the logarithm of their position.
MINISTRAL3 = llama_like(
    "ministral3",
    "Ministral3",
    *SILU,
    same("head_dim", "kv_channels", 128),
    windows(),
    epsilon=1e-5,
    rope=SCALED_QUERIES,
)

IN_VISION_LANGUAGE = (QWEN2_VL_TEXT, QWEN2_5_VL_TEXT, QWEN3_VL_TEXT)
DENSE = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, OLMO2, OLMO3),
    *(SMOLLM3, EXAONE4, GLM4, SEED_OSS, GRANITE, MINISTRAL3),
)


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
        demand(
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
        ),
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


_AHEAD = {
    **{"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"},
    **{"eh_proj": "fc", "final_layernorm": "norm"},
}


def _outside_ahead(name: str, shape: ModelShape) -> str | None:
    """Return their name of a part of the MTP layer that all of its layers would share."""
    found = re.fullmatch(rf"mtp\.layers\.0\.({'|'.join(_AHEAD)})\.weight", name)
    return f"mtp.{_AHEAD[found[1]]}.weight" if found else None


def _read_ahead(config: Config) -> Values:
    count = config.get("mtp_num_hidden_layers", config.get("num_nextn_predict_layers", 1))
    if count not in (0, 1):
        raise CheckpointError(
            f"config.json has {count} MTP layers, which share norms and projection: only 1 can be "
            "converted"
        )
    return {"mtp_num_layers": count or None}


def with_mtp(family: Family) -> Family:
    """Return ``family`` with the MTP layer of Qwen3-Next and Qwen3.5, which transformers drops."""
    count = Field(_read_ahead, lambda shape: {"mtp_num_hidden_layers": shape.mtp_num_layers or 0})
    return replace(
        family,
        fields=(*family.fields, count),
        elsewhere=_outside_ahead,
        ahead_prefix="mtp.layers.{}.",
    )
