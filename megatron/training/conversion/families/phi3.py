"""Phi-3: Llama with one matrix for queries, keys and values, one for gate and up, and LongRoPE."""

from __future__ import annotations

from megatron.training.conversion.families.fields import (
    LLAMA_FIELDS,
    LLAMA_OUTSIDE,
    activation,
    norm,
    same,
    tied,
    windows,
)
from megatron.training.conversion.families.llama import LAYER
from megatron.training.conversion.family import Family
from megatron.training.conversion.tensors import Rule

FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fields=(
        *LLAMA_FIELDS,
        norm(1e-5),
        activation("hidden_act", "silu"),
        tied(False),
        windows(),
        same("resid_pdrop", "hidden_dropout", 0.0),
        same("embd_pdrop", "hidden_dropout", 0.0),
    ),
    outside=LLAMA_OUTSIDE,
    layer={
        **LAYER,
        "self_attention.linear_qkv.weight": Rule(("self_attn.qkv_proj.weight",), is_qkv=True),
        "mlp.linear_fc1.weight": "mlp.gate_up_proj.weight",
    },
)
