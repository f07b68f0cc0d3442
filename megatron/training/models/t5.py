"""Build T5, its datasets and its batch table from a RunConfig."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.datasets.t5_dataset import (
    MockT5MaskedWordPieceDataset,
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_decoder_with_transformer_engine_block_spec,
    get_t5_encoder_with_local_block_spec,
    get_t5_encoder_with_transformer_engine_block_spec,
)
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    ModelImplementation,
    TensorSpec,
    language_arguments,
)


def build_t5_model(config: RunConfig, *, vp_stage: int | None = None, **stage: Any) -> T5Model:
    """Build one pipeline stage of T5 on the current device."""
    assert vp_stage is None, "the checks refuse virtual stages"
    encoder = config.model
    depth = config.language_model.decoder_num_layers
    assert depth is not None, "it follows from --num-layers"
    decoder = encoder.changed(num_layers=depth)
    if encoder.transformer_impl == "local":
        encoder_spec = get_t5_encoder_with_local_block_spec(encoder.num_layers)
        decoder_spec = get_t5_decoder_with_local_block_spec(decoder.num_layers)
    else:
        encoder_spec = get_t5_encoder_with_transformer_engine_block_spec(
            encoder.num_layers, encoder
        )
        decoder_spec = get_t5_decoder_with_transformer_engine_block_spec(
            decoder.num_layers, decoder
        )
    return T5Model(
        config=decoder,
        encoder_config=encoder,
        transformer_encoder_layer_spec=encoder_spec,
        transformer_decoder_layer_spec=decoder_spec,
        relative_attention_num_buckets=encoder.relative_attention_num_buckets,
        relative_attention_max_distance=encoder.relative_attention_max_distance,
        **language_arguments(config, **stage),
    )


def t5_dataset_config(config: RunConfig, **common: Any) -> T5MaskedWordPieceDatasetConfig:
    """Return the T5 dataset config; the flags set the masking rate and the sequence lengths."""
    data = config.data
    assert data.decoder_seq_length is not None, "it follows from --seq-length"
    return T5MaskedWordPieceDatasetConfig(
        sequence_length_decoder=data.decoder_seq_length,
        masking_probability=data.mask_prob,
        short_sequence_probability=data.short_seq_prob,
        masking_max_ngram=10,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=True,
        **common,
    )


def t5_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    text_enc and enc_mask are [b, s]; text_dec, labels and loss_mask are [b, t]; all are int64.
    There is no decoder padding mask: decoder padding is at the end of the sequence, so the causal
    mask already hides it from the other tokens.
    """
    data, b = config.data, config.training.micro_batch_size
    assert data.seq_length is not None, "resolve() has checked it"
    assert data.decoder_seq_length is not None, "it follows from --seq-length"
    first_decoder = config.model.encoder_pipeline_model_parallel_size if num_stages > 1 else 0
    source = TensorSpec(torch.int64, (b, data.seq_length))
    target = TensorSpec(torch.int64, (b, data.decoder_seq_length))
    is_last = stage == num_stages - 1
    return {
        "text_enc": source if stage == 0 else None,
        "enc_mask": source,
        "text_dec": target if stage >= first_decoder else None,
        "labels": target if is_last else None,
        "loss_mask": target if is_last else None,
    }


def apply_t5(model: nn.Module, batch: Batch) -> Tensor:
    """Run one stage: return token losses [b, t] on the last stage, hidden states on the others."""
    mask = batch["enc_mask"]
    assert mask is not None, "every stage reads it"
    padding = mask == 0
    losses: Tensor = model(
        batch["text_enc"], batch["text_dec"], padding, None, padding, lm_labels=batch["labels"]
    )
    return losses


T5 = ModelImplementation(
    build=build_t5_model,
    datasets=(T5MaskedWordPieceDataset, MockT5MaskedWordPieceDataset),
    dataset_config=t5_dataset_config,
    batch=t5_batch,
    apply=apply_t5,
)
