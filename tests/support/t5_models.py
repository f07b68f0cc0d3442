"""T5 of both programs, small, with the same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.activations import openai_gelu
from megatron.core.models.T5 import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.support.one_process import one_process_groups, tiny_config

VOCABULARY, BUCKETS, FAR = 61, 8, 20


@dataclass(frozen=True)
class Shape:
    """The original release, or v1.1: gated, untied, logits as they are."""

    is_v11: bool = False
    encoder_layers: int = 2
    decoder_layers: int = 3


def build_t5(
    shape: Shape = Shape(),
    groups: ProcessGroupCollection | None = None,
    position: str = "relative",
    **changes: Any,
) -> T5Model:
    """As transformers has it, unless ``changes`` say otherwise."""
    act = openai_gelu if shape.is_v11 else F.relu
    settings: dict[str, Any] = {
        "num_layers": shape.decoder_layers,
        "ffn_hidden_size": 48,
        "kv_channels": 12,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "gated_linear_unit": shape.is_v11,
        "activation_func": act,
        "softmax_scale": 1.0,
        "output_scale": None if shape.is_v11 else 0,
        "init_method_std": 0.15,
    }
    config = tiny_config(**settings | changes)
    groups = groups or one_process_groups()
    pp = groups.pp
    return T5Model(
        config,
        replace(config, num_layers=shape.encoder_layers),
        get_t5_encoder_with_local_block_spec(shape.encoder_layers),
        get_t5_decoder_with_local_block_spec(shape.decoder_layers),
        VOCABULARY + 3,
        32,
        pre_process=pp.rank() == 0,
        post_process=pp.rank() == pp.size() - 1,
        share_embeddings_and_output_weights=not shape.is_v11,
        position_embedding_type=position,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=FAR,
        pg_collection=groups,
        unpadded_vocab_size=VOCABULARY,
    )


def build_transformers(shape: Shape) -> Any:
    """T5ForConditionalGeneration without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=12,
        d_ff=48,
        num_layers=shape.encoder_layers,
        num_decoder_layers=shape.decoder_layers,
        num_heads=4,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=FAR,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if shape.is_v11 else "relu",
        tie_word_embeddings=not shape.is_v11,
        initializer_factor=1.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(11)
    model = T5ForConditionalGeneration(config).eval()
    if shape.is_v11:  # whose output layer is its own, which transformers 5 does not build any more
        model.lm_head.weight = nn.Parameter(0.3 * torch.randn_like(model.lm_head.weight))
    return model
