"""Supervised fine-tuning of GPT (--sft): datasets, batch table and forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.collectives import broadcast_json
from megatron.core.utils import get_attr_wrapped_model
from megatron.training.config.run import SFT, RunConfig
from megatron.training.datasets.sft_dataset import MockSFTDataset, SFTDataset, SFTDatasetConfig
from megatron.training.models.gpt import build_gpt_model
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    DocumentSpec,
    ModelImplementation,
    TensorSpec,
)
from megatron.training.models.registry import implementation_of
from megatron.training.runtime.runtime import Runtime
from megatron.training.tokenizer.sft_tokenizer import chat_template_of


def sft_dataset_config(config: RunConfig, **common: Any) -> SFTDatasetConfig:
    """Return the dataset config; ``common`` holds the arguments shared by all model kinds."""
    return SFTDatasetConfig(**sft_settings(config, common["tokenizer"]), **common)


def sft_settings(config: RunConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the settings of `SFTDatasetConfig` of its own."""
    data = config.data
    assert data.sft_alignment is not None, "it follows from --context-parallel-size"
    return {
        "chat": chat_template_of(tokenizer, config.tokenizer),
        "packs": data.sft_packing,
        "alignment": data.sft_alignment,
        "truncates": data.sft_long_conversations == "truncate",
    }


def set_loss_share(run: Runtime, config: SFTDatasetConfig) -> dict[str, Any]:
    """Set ``run.loss_share`` to that of the training data, for the auxiliary losses of experts.

    The loss is divided by the number of trained tokens, or of pairs of answers.  Returns no
    settings.  Collective over all ranks.
    """
    if run.config.model.num_moe_experts is None:
        return {}
    counts = [0, 0]
    if run.is_rank_0:
        cls = implementation_of(run.config).datasets[run.config.data.mock_data]
        blend = config.blend if config.blend is not None else (config.blend_per_split or [None])[0]
        for path in blend[0] if blend is not None else [None]:
            source: Any = cls.build_low_level_dataset(path, config)
            rows = source.encoded(config)
            is_of_pairs = run.config.objective != SFT
            counts[0] += len(rows.ends) // 2 if is_of_pairs else int(rows.is_trained.sum())
            counts[1] += len(rows.tokens) - len(rows.ends)
    num_losses, num_tokens = broadcast_json(counts, run.groups.world)
    run.loss_share = num_losses / max(1, num_tokens)
    return {}


def sft_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    tokens, labels, loss_mask, position_ids and is_padding are [b, s]; packed_seq_params are the
    bounds of samples, which every stage reads.  Experts leave out padding.
    """
    b = config.training.micro_batch_size
    s = config.data.seq_length
    is_first = stage == 0
    is_last = stage == num_stages - 1
    ids = TensorSpec(torch.int64, (b, s))
    looks_ahead = is_last and config.model.mtp_num_layers is not None
    has_experts = config.model.num_moe_experts is not None
    return {
        "tokens": ids if is_first or looks_ahead else None,
        "labels": ids if is_last else None,
        "loss_mask": TensorSpec(torch.float32, (b, s)) if is_last else None,
        "position_ids": ids if is_first else None,
        "is_padding": TensorSpec(torch.bool, (b, s)) if has_experts else None,
        "packed_seq_params": DocumentSpec(b, s),
    }


def apply_sft(model: nn.Module, batch: Batch) -> Tensor:
    """Run one stage: return token losses [1, b s/cp] on the last, hidden states on the others."""
    is_padding = batch["is_padding"]
    if is_padding is not None and get_attr_wrapped_model(model, "config").sequence_parallel:
        tp = get_attr_wrapped_model(model, "pg_collection").tp
        is_padding = is_padding.chunk(tp.size(), 1)[tp.rank()]
    losses: Tensor = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=batch["packed_seq_params"],
        extra_block_kwargs=None if is_padding is None else {"padding_mask": is_padding},
    )
    return losses


GPT_SFT = ModelImplementation(
    build=build_gpt_model,
    datasets=(SFTDataset, MockSFTDataset),
    dataset_config=sft_dataset_config,
    batch=sft_batch,
    apply=apply_sft,
    joins_rows=True,
    prepare_data=set_loss_share,
)
