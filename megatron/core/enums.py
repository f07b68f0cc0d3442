"""Enumerations that several packages use, under the names of Megatron Core.  No torch."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """Kind of model that a model provider builds."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


class Fp8Recipe(str, enum.Enum):
    """Values of --fp8-recipe."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"


class AttnBackend(enum.Enum):
    """Implementation of core attention."""

    __module__ = "megatron.core.transformer.enums"  # Megatron-LM's path, for pickled arguments

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


class CudaGraphScope(enum.Enum):
    """Parts of a step that ``cuda_graph_scope`` may list."""

    full_iteration = 1
    attn = 2
    mlp = 3
    moe = 4
    moe_router = 5
    moe_preprocess = 6
    mamba = 7


class AttnMaskType(enum.Enum):
    """Attention mask: the keys that a query attends to."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


class AttnType(enum.Enum):
    """Source of keys and values."""

    self_attn = 1
    cross_attn = 2


class LayerType(enum.Enum):
    """Kind of layer in --pipeline-model-parallel-layout."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5
