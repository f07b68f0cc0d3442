"""Families with layers of linear attention: Qwen3-Next, Qwen3.5, OLMo-Hybrid and Kimi-Linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.ssm.mamba_hybrid_layer_allocation import delta_net_shape
from megatron.core.transformer.config.attention import KDA
from megatron.training.checkpointing.checkpoint_args import LINEAR
from megatron.training.conversion.families.experts import (
    BALANCED,
    FIRST_DENSE,
    FIXED_EPSILON,
    LATENT,
    LATENT_FIELDS,
    LATENT_LAYER,
    LATENT_ROPE,
    MIXTRAL,
    NORMED,
    NORMED_BY_DEFAULT,
    PROJECTIONS,
    QWEN_MOE,
    SHARED_EXPERT_LAYER,
    SOFTMAX,
    SPARSE,
    gated,
    groups,
)
from megatron.training.conversion.families.llama import NO_BIAS, OLMO2, SILU, llama_like, with_mtp
from megatron.training.conversion.family import (
    LLAMA_OUTSIDE,
    ROPE,
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
from megatron.training.conversion.tensors import Heads, Rule, group_rows

# Qwen3-Next and Qwen3.5: three layers of linear attention, then one whose attention has a gate.

_LINEAR, _FULL = "linear_attention", "full_attention"


def _read_layers(config: Config) -> Values:
    step, count = config.get("full_attention_interval", 4), config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        _LINEAR if i % step else _FULL for i in range(1, count + 1)
    ]
    if strange := {*kinds} - {_LINEAR, _FULL}:
        raise CheckpointError(f"config.json has layer_types {', '.join(sorted(strange))}")
    return {"linear_layers": tuple(kind == _LINEAR for kind in kinds)}


def _write_layers(shape: ModelShape) -> Values:
    linear = shape.linear_layers or (False,) * shape.num_layers
    return {"layer_types": [_LINEAR if is_linear else _FULL for is_linear in linear]}


_DELTA_NET = (
    Field(_read_layers, _write_layers),
    *(same(name, name, getattr(ModelShape, name)) for name in LINEAR),
    same("head_dim", "kv_channels", 256),
    NO_BIAS,
    Field(  # replaces ROPE's entry
        lambda config: ROPE.read({"partial_rotary_factor": 0.25, **config}),
        lambda shape: {"partial_rotary_factor": shape.rotary_percent},
    ),
)
_GATED: Values = {"apply_layernorm_1p": True, "qk_norm": "head", "attention_output_gate": True}


def _rows_of_gated(shape: Heads) -> list[Tensor]:
    """Return the rows of q, k and v: each head of q_proj has its query and then its gate."""
    rows = torch.arange(shape.num_query_groups * sum(group_rows(shape)))
    groups = rows.view(shape.num_query_groups, -1, shape.kv_channels)
    *gated, k, v = groups.split([(groups.shape[1] - 2) // 2] * 2 + [1, 1], 1)
    return [torch.stack(gated, 2).flatten(), k.flatten(), v.flatten()]


def _rows_by_head(shape: Heads) -> list[Tensor]:
    """Return the rows of in_proj_qkvz and in_proj_ba, which alternate by key head."""
    parts = torch.arange(sum(widths := delta_net_shape(shape).projected)).split(widths)
    q, k, v, z, beta, alpha = (part.view(shape.linear_num_key_heads, -1) for part in parts)
    return [torch.cat([q, k, v, z], 1).flatten(), torch.cat([beta, alpha], 1).flatten()]


def _rows_by_kind(shape: Heads) -> list[Tensor]:
    """Return the rows of in_proj_qkv, in_proj_z, in_proj_b and in_proj_a."""
    keys, _, *rest = delta_net_shape(shape).projected
    sizes = [2 * keys + rest[0], *rest[1:]]
    return list(torch.arange(sum(sizes)).split(sizes))


def _delta_net_layer(*projections: str, rows: Callable[[Heads], Sequence[Tensor]]) -> Names:
    names = {"out_norm": "norm", **{name: name for name in "conv1d A_log dt_bias out_proj".split()}}
    theirs = tuple(f"linear_attn.in_proj_{name}" for name in projections)
    return {
        "self_attention.in_proj": Rule(theirs, rows=rows),
        **{f"self_attention.{own}": f"linear_attn.{name}" for own, name in names.items()},
        "self_attention.linear_qkv": Rule(
            tuple(f"self_attn.{letter}_proj" for letter in "qkv"), rows=_rows_of_gated
        ),
    }


_WITH_SHARED = (
    *QWEN_MOE,
    same("num_experts", "num_experts", 512),
    same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
)
QWEN3_NEXT = llama_like(
    "qwen3_next",
    "Qwen3Next",
    *_WITH_SHARED,
    NORMED_BY_DEFAULT,
    *_DELTA_NET,
    layer={**SHARED_EXPERT_LAYER, **_delta_net_layer("qkvz", "ba", rows=_rows_by_head)},
    always={**SOFTMAX, **_GATED, "moe_shared_expert_gate": True},
)
QWEN3_NEXT = with_mtp(QWEN3_NEXT)
_BY_KIND = _delta_net_layer("qkv", "z", "b", "a", rows=_rows_by_kind)
QWEN3_5 = llama_like("qwen3_5_text", "Qwen3_5", *SILU, *_DELTA_NET, layer=_BY_KIND, always=_GATED)
QWEN3_5 = with_mtp(QWEN3_5)
# Every layer has experts, and config.json no other width.
_OF_NEXT = (SIZES[1], NORMED, NORMED_BY_DEFAULT, SPARSE)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields=(
        *(f for f in QWEN3_NEXT.fields if f not in _OF_NEXT),
        Field(
            lambda config: {
                "ffn_hidden_size": config["moe_intermediate_size"],
                "expert_layers": (True,) * config["num_hidden_layers"],
            }
        ),
    ),
    layer={**QWEN3_NEXT.layer, **_BY_KIND},
)


# OLMo-Hybrid: layers of linear attention normalize their input, the others, as in OLMo 2, their
# output.  Without a base in rope_parameters no layer has positions.


def _rows_of_projections(shape: Heads) -> list[Tensor]:
    widths = delta_net_shape(shape).projected
    return list(torch.arange(sum(widths)).split(widths))


def _rows_of_convolution(shape: Heads) -> list[Tensor]:
    widths = delta_net_shape(shape).convolved
    return list(torch.arange(sum(widths)).split(widths))


def _separate_layer(prefix: str, gate: str, alpha: str) -> Names:
    """Return the names of linear attention with a tensor per projection and per convolution."""
    projections = ("q_proj", "k_proj", "v_proj", gate, "b_proj", alpha)
    return {
        "self_attention.in_proj": Rule(
            tuple(f"{prefix}.{name}" for name in projections), rows=_rows_of_projections
        ),
        "self_attention.conv1d": Rule(
            tuple(f"{prefix}.{letter}_conv1d" for letter in "qkv"), rows=_rows_of_convolution
        ),
        "self_attention.A_log": f"{prefix}.A_log",
        "self_attention.dt_bias": f"{prefix}.dt_bias",
        "self_attention.out_norm": f"{prefix}.o_norm",
        "self_attention.out_proj": f"{prefix}.o_proj",
    }


def _read_positions(config: Config) -> Values:
    rope = config.get("rope_parameters")
    if rope and rope.get("rope_theta") is None:
        return {"position_embedding_type": "none"}
    return ROPE.read(config)


def _write_positions(shape: ModelShape) -> Values:
    if shape.position_embedding_type == "none":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return ROPE.write(shape)


def _width(config: Config) -> int:
    heads = config.get("linear_num_key_heads") or config["num_attention_heads"]
    return config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / heads)


OLMO_HYBRID = llama_like(
    "olmo_hybrid",
    "OlmoHybrid",
    *SILU,
    NO_BIAS,
    _DELTA_NET[0],
    same("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
    same("linear_key_head_dim", "linear_key_head_dim", _width),
    same("linear_value_head_dim", "linear_value_head_dim", lambda config: 2 * _width(config)),
    *(
        same(name, name, lambda config: config["num_attention_heads"])
        for name in ("linear_num_key_heads", "linear_num_value_heads")
    ),
    same("linear_allow_neg_eigval", "linear_allow_neg_eigval", True),
    layer={**OLMO2.layer, **_separate_layer("linear_attn", "g_proj", "a_proj")},
    always={**OLMO2.always, "layer_norm_placement": "post_softmax", "linear_norm_epsilon": 1e-5},
    rope=Field(_read_positions, _write_positions),
)
OLMO_HYBRID = replace(
    OLMO_HYBRID,
    layer={**OLMO_HYBRID.layer, "input_layernorm": "input_layernorm"},
    spellings={
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
    },
)

# Kimi-Linear: KDA, latent attention without positions in every fourth layer, and the experts of
# DeepSeek V3.  Its config.json has other names for entries of DeepSeek's.

_KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}


def _renamed(each: Field, names: Mapping[str, str]) -> Field:
    """Return a field whose entries of config.json have other names."""

    def read(config: Config) -> Values:
        found = {old: config[new] for old, new in names.items() if new in config}
        return each.read({**config, **found})

    def write(shape: ModelShape) -> Values:
        return {names.get(name, name): value for name, value in each.write(shape).items()}

    return Field(read, write)


def _read_kimi_layers(config: Config) -> Values:
    """Read which layers have KDA and experts; published models have lists that count from 1."""
    count, given = config["num_hidden_layers"], config.get("linear_attn_config") or {}
    kinds = config.get("layer_types")
    if kinds is None and "kda_layers" in given:
        kinds = [_LINEAR if i + 1 in given["kda_layers"] else _FULL for i in range(count)]
    if kinds is None:
        kinds = [_FULL if i and i % 4 == 0 else _LINEAR for i in range(count)]
    width = given.get("head_dim") or config.get("linear_head_dim", 128)
    heads = given.get("num_heads") or config.get("linear_num_heads", 32)
    taps = given.get("short_conv_kernel_size") or config.get("linear_conv_kernel_dim", 4)
    dense = FIRST_DENSE.read({"first_k_dense_replace": 1, **config})["expert_layers"]
    parts = config.get("mlp_layer_types")
    return {
        **_read_layers({**config, "layer_types": kinds}),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), width),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
        "linear_conv_kernel_dim": taps,
        "expert_layers": tuple(part == "sparse" for part in parts) if parts else dense,
        "without_rope": (True,) * count,
    }


def _write_kimi_layers(shape: ModelShape) -> Values:
    return {
        **_write_layers(shape),
        "linear_head_dim": shape.linear_key_head_dim,
        "linear_num_heads": shape.linear_num_key_heads,
        "linear_conv_kernel_dim": shape.linear_conv_kernel_dim,
        "mlp_layer_types": ["sparse" if has else "dense" for has in shape.expert_layers],
    }


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    always={
        **{**LATENT, **BALANCED, "attention_variant": KDA},
        "mla_latent_norm_epsilon": 1e-6,  # of transformers' code; config.json has the others'
    },
    fields=(
        *(
            _renamed(each, _KIMI_NAMES)
            for each in (*LATENT_FIELDS, groups(2), demand(norm_topk_prob=True))
            if each not in (LATENT_ROPE, FIRST_DENSE, FIXED_EPSILON)
        ),
        same("rms_norm_eps", "norm_epsilon", 1e-5),
        Field(_read_kimi_layers, _write_kimi_layers),
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **{ours: theirs for ours, theirs in LATENT_LAYER.items() if "expert" not in ours},
        **{ours: theirs for ours, theirs in MIXTRAL.layer.items() if "expert" in ours},
        **gated("mlp.shared_experts", "block_sparse_moe.shared_experts", *PROJECTIONS),
        "mlp.router": "block_sparse_moe.gate",
        "mlp.router.expert_bias": "block_sparse_moe.gate.e_score_correction_bias",
        **_separate_layer("self_attn", "g_a_proj", "f_a_proj"),
        "self_attention.A_log": Rule(("self_attn.A_log",), view=(1, 1, -1, 1)),
        "self_attention.gate_up": "self_attn.g_b_proj.weight",
        "self_attention.alpha_up": "self_attn.f_b_proj.weight",
    },
    # transformers writes MLPs of layers without experts under the name of experts.
    spellings={f"block_sparse_moe.{name}": f"mlp.{name}" for name in PROJECTIONS},
)
