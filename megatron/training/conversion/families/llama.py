"""Llama 1 to 3, and what is built like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.training.conversion.families.fields import (
    HEAD_DIM,
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    demand,
    norm,
    tied,
)
from megatron.training.conversion.family import Config, Family, Field
from megatron.training.conversion.tensors import Rule


def _qkv(kind: str) -> Rule:
    return Rule(tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), is_qkv=True)


# A layer with norms before attention and MLP; families take from it what they share.
LAYER: Mapping[str, str | Rule] = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc1.bias": Rule(("mlp.gate_proj.bias", "mlp.up_proj.bias")),
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}


def _read_bias(config: Config) -> dict[str, Any]:
    attention, mlp = (bool(config.get(f"{part}_bias", False)) for part in ("attention", "mlp"))
    if attention != mlp:
        raise CheckpointError(
            f"config.json has attention_bias {attention} and mlp_bias {mlp}: "
            "only both or neither can be converted"
        )
    return {"add_bias_linear": mlp, "add_qkv_bias": mlp}


_BIAS = Field(
    _read_bias,
    lambda shape: dict.fromkeys(("attention_bias", "mlp_bias"), shape.add_bias_linear),
)

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(
        *LLAMA_FIELDS,
        HEAD_DIM,
        norm(1e-6),
        activation("hidden_act", "silu"),
        tied(False),
        _BIAS,
        demand("pretraining_tp", 1),
    ),
    outside=LLAMA_OUTSIDE,
    layer=LAYER,
)
