"""Layer specs of LLaVA's language model, under Megatron-LM's names: those of GPT."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec


def decoder_model_with_transformer_engine_default_spec(
    num_experts: int | None = None, moe_grouped_gemm: bool = False, qk_layernorm: bool = False
) -> ModuleSpec:
    """Return the spec of a causal layer with Transformer Engine's modules."""
    return get_gpt_layer_with_transformer_engine_spec(num_experts, moe_grouped_gemm, qk_layernorm)


def decoder_model_with_local_default_spec(
    num_experts: int | None = None, moe_grouped_gemm: bool = False, qk_layernorm: bool = False
) -> ModuleSpec:
    """Return the spec of a causal layer with plain PyTorch modules."""
    return get_gpt_layer_local_spec(num_experts, moe_grouped_gemm, qk_layernorm)
