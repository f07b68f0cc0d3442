"""Build BERT, its datasets and its batch table from a RunConfig."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
    MockBERTMaskedWordPieceDataset,
)
from megatron.core.models.bert.bert_layer_specs import (
    get_bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    ModelImplementation,
    TensorSpec,
    language_arguments,
)


def build_bert_model(
    config: RunConfig, *, vp_stage: int | None = None, return_embeddings: bool = False, **stage: Any
) -> BertModel:
    """Build one pipeline stage of BERT on the current device."""
    lm = config.language_model
    is_local = config.model.transformer_impl == "local"
    spec = get_bert_layer_local_spec if is_local else get_bert_layer_with_transformer_engine_spec
    return BertModel(
        config=config.model,
        num_tokentypes=2 if lm.bert_binary_head else 0,
        transformer_layer_spec=spec(config.model),
        add_binary_head=lm.bert_binary_head,
        return_embeddings=return_embeddings,
        vp_stage=vp_stage,
        **language_arguments(config, **stage),
    )


def bert_dataset_config(config: RunConfig, **common: Any) -> BERTMaskedWordPieceDatasetConfig:
    """Return the BERT dataset config; the flags set the masking rate, the rest is Megatron-LM's."""
    return BERTMaskedWordPieceDatasetConfig(
        masking_probability=config.data.mask_prob,
        short_sequence_probability=config.data.short_seq_prob,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=config.language_model.bert_binary_head,
        **common,
    )


def bert_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    text, types, labels, loss_mask and padding_mask are [b, s], is_random is [b], all int64.  The
    first stage reads the token ids, the last stage the labels, every stage the padding mask.
    """
    b, s = config.training.micro_batch_size, config.data.seq_length
    has_head = config.language_model.bert_binary_head
    is_first, is_last = stage == 0, stage == num_stages - 1
    tokens, sequences = TensorSpec(torch.int64, (b, s)), TensorSpec(torch.int64, (b,))
    return {
        "text": tokens if is_first else None,
        "types": tokens if is_first and has_head else None,
        "labels": tokens if is_last else None,
        "loss_mask": tokens if is_last else None,
        "padding_mask": tokens,
        "is_random": sequences if is_last and has_head else None,
    }


def apply_bert(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None] | Tensor:
    """Run one stage on ``batch``.

    Return token losses [b, s] and sentence-order logits [b, 2] (None without the binary head) on
    the last stage, hidden states on the others.
    """
    result: tuple[Tensor, Tensor | None] | Tensor = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"],
        lm_labels=batch["labels"],
    )
    return result


BERT = ModelImplementation(
    build=build_bert_model,
    datasets=(BERTMaskedWordPieceDataset, MockBERTMaskedWordPieceDataset),
    dataset_config=bert_dataset_config,
    batch=bert_batch,
    apply=apply_bert,
)
