"""Layer specs of T5's encoder and decoder: the class of each submodule."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.enums import AttnMaskType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    LOCAL,
    layer_of,
    transformer_engine_parts,
)
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def get_t5_encoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return a spec of ``num_layers`` encoder layers with bidirectional attention."""
    return _encoder(LOCAL, num_layers)


def get_t5_decoder_with_local_block_spec(num_layers: int) -> TransformerBlockSubmodules:
    """Return a spec of ``num_layers`` decoder layers: causal attention and cross attention."""
    return _decoder(LOCAL, num_layers)


def get_t5_encoder_with_transformer_engine_block_spec(
    num_layers: int, config: TransformerConfig | None = None
) -> TransformerBlockSubmodules:
    """Return the encoder spec with Transformer Engine's modules.

    A module that cannot do what ``config`` requests is ours.
    """
    return _encoder(transformer_engine_parts(config), num_layers)


def get_t5_decoder_with_transformer_engine_block_spec(
    num_layers: int, config: TransformerConfig | None = None
) -> TransformerBlockSubmodules:
    """Return the decoder spec with Transformer Engine's modules.

    A module that cannot do what ``config`` requests is ours.
    """
    return _decoder(transformer_engine_parts(config), num_layers)


def _encoder(backend: BackendSpecProvider, num_layers: int) -> TransformerBlockSubmodules:
    layer = _layer(backend, AttnMaskType.padding)
    return TransformerBlockSubmodules([layer] * num_layers, backend.layer_norm())


def _decoder(backend: BackendSpecProvider, num_layers: int) -> TransformerBlockSubmodules:
    layer = _layer(backend, AttnMaskType.causal)
    column = backend.column_parallel_linear()
    row = backend.row_parallel_linear()
    layer.submodules.pre_cross_attn_layernorm = backend.layer_norm()
    layer.submodules.cross_attention = ModuleSpec(
        CrossAttention,
        {"attn_mask_type": AttnMaskType.padding},
        CrossAttentionSubmodules(column, column, backend.core_attention(), row),
    )
    layer.submodules.cross_attn_bda = get_bias_dropout_add
    return TransformerBlockSubmodules([layer] * num_layers, backend.layer_norm())


def _layer(backend: BackendSpecProvider, mask: AttnMaskType) -> ModuleSpec:
    """Return a GPT layer with the norms as modules of their own."""
    layer = layer_of(replace(backend, column_behind_norm=None), config=None)
    layer.submodules.self_attention.params["attn_mask_type"] = mask
    return layer
