"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any

from megatron.training.conversion.families.experts import TOPK, gated
from megatron.training.conversion.families.fields import (
    HEAD_DIM,
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    norm,
    same,
    tied,
    windows,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Config, Family, Field


def _read_width(config: Config) -> dict[str, Any]:
    every = (True,) * config["num_hidden_layers"]
    return {"moe_ffn_hidden_size": config["intermediate_size"], "expert_layers": every}


# Every layer has experts, which have the width that others say of an MLP.
WIDTH_OF_ALL = Field(_read_width, lambda shape: {})

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    always={"moe_router_score_function": "softmax"},
    fields=(
        *LLAMA_FIELDS,
        HEAD_DIM,
        norm(1e-5),
        activation("hidden_act", "silu"),
        tied(False),
        windows(),
        same("num_local_experts", "num_experts"),
        TOPK,
        WIDTH_OF_ALL,
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **LAYER,
        "mlp.router.weight": "block_sparse_moe.gate.weight",
        **gated("mlp.experts.local_experts.{}", "block_sparse_moe.experts.{}", "w1", "w3", "w2"),
    },
)
