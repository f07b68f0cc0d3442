"""What scripts hand over by place: the order of arguments is Megatron Core's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.mamba import MambaModel
from megatron.core.models.T5 import T5Model

ENDS = "fp16_lm_cross_entropy parallel_output share_embeddings_and_output_weights "
ROTARY = "position_embedding_type rotary_percent "
ORDER: dict[Callable[..., Any], str] = {
    GPTModel: "config transformer_layer_spec vocab_size max_sequence_length pre_process "
    f"post_process {ENDS}{ROTARY}rotary_base rope_scaling rope_scaling_factor "
    "scatter_embedding_sequence_parallel seq_len_interpolation_factor mtp_block_spec",
    MambaModel: "config mamba_stack_spec vocab_size max_sequence_length pre_process "
    "hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern post_process "
    f"{ENDS}{ROTARY}rotary_base scatter_embedding_sequence_parallel seq_len_interpolation_factor",
    BertModel: "config num_tokentypes transformer_layer_spec vocab_size max_sequence_length "
    f"pre_process post_process {ENDS}{ROTARY}seq_len_interpolation_factor add_binary_head "
    "return_embeddings",
    T5Model: "config encoder_config transformer_encoder_layer_spec transformer_decoder_layer_spec "
    f"vocab_size max_sequence_length pre_process post_process {ENDS}{ROTARY}"
    "seq_len_interpolation_factor relative_attention_num_buckets relative_attention_max_distance "
    "add_encoder add_decoder",
}


@pytest.mark.parametrize("model", ORDER, ids=lambda model: model.__name__)
def test_models_take_their_arguments_in_the_order_of_the_reference(
    model: Callable[..., Any],
) -> None:
    names = ORDER[model].split()
    given = inspect.signature(model).bind(*names).arguments
    assert list(given.items()) == [(name, name) for name in names]
