"""Supervised fine-tuning of GPT (--sft): datasets, batch table and forward pass."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.parallel.collectives import broadcast_json
from megatron.core.parallel.context_parallel_partition import sequence_divisor
from megatron.core.utils import get_attr_wrapped_model
from megatron.post_training.sft.dataset import MockSFTDataset, SFTDataset, SFTDatasetConfig
from megatron.training.config.run import SFT, RunConfig
from megatron.training.models.gpt import build_gpt_model
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    DocumentSpec,
    ModelImplementation,
    TensorSpec,
)
from megatron.training.models.registry import implementation_of
from megatron.training.runtime.context import RunContext
from megatron.training.tokenizer.sft_tokenizer import chat_template_of

_UNIT = 16  # tokens: rows that are not packed have a multiple of it, as 8-bit GEMMs need


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
        "row_multiple": row_multiple(config),
    }


def row_multiple(config: RunConfig) -> int | None:
    """Return the divisor of the lengths of rows of one sample; None: all have --seq-length tokens.

    So they do where something has buffers of one size: overlapped tensor parallelism, experts that
    all-gather the tokens of data-parallel ranks, and a teacher or a store of predictions.
    """
    m = config.model
    gathers = m.moe_token_dispatcher_type == "allgather" and m.expert_model_parallel_size > 1
    has_one_size = m.tp_comm_overlap or gathers
    if config.data.sft_packing or has_one_size or config.distillation.method is not None:
        return None
    assert config.data.sft_alignment is not None, "it follows from --context-parallel-size"
    of_layout = sequence_divisor(
        cp=m.context_parallel_size,
        tp=m.tensor_model_parallel_size,
        sequence_parallel=m.sequence_parallel,
    )
    return math.lcm(_UNIT, config.data.sft_alignment, of_layout)


def token_specs(config: RunConfig) -> tuple[TensorSpec, TensorSpec]:
    """Return the specs of integers and of reals, one for each token of a micro-batch.

    [b, s], or with `row_multiple` the tokens of all rows, [n].
    """
    shape = (config.training.micro_batch_size, _row_length(config))
    if row_multiple(config) is None:
        return TensorSpec(torch.int64, shape), TensorSpec(torch.float32, shape)
    most = math.prod(shape)
    return TensorSpec(torch.int64, (-1,), most), TensorSpec(torch.float32, (-1,), most)


def _row_length(config: RunConfig) -> int:
    """Return the longest row of a micro-batch on this rank."""
    return config.model.max_seqlen_per_dp_cp_rank or config.data.seq_length


def set_loss_share(run: RunContext, config: SFTDatasetConfig) -> dict[str, Any]:
    """Set ``loss_share`` of the objective from the training data, for auxiliary losses of experts.

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
    if run.config.objective != SFT:
        num_losses *= run.groups.cp.size()  # each of whose ranks counts all pairs
    run.objective.loss_share = num_losses / max(1, num_tokens)
    return {}


def sft_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    tokens, labels, loss_mask, position_ids and is_padding: see `token_specs`; packed_seq_params
    are the bounds of samples, which every stage reads.  Experts leave out padding.
    """
    b = config.training.micro_batch_size
    s = _row_length(config)
    is_first = stage == 0
    is_last = stage == num_stages - 1
    ids, reals = token_specs(config)
    looks_ahead = is_last and config.model.mtp_num_layers is not None
    has_experts = config.model.num_moe_experts is not None
    return {
        "tokens": ids if is_first or looks_ahead else None,
        "labels": ids if is_last else None,
        "loss_mask": reals if is_last else None,
        "position_ids": ids if is_first else None,
        "is_padding": ids._replace(dtype=torch.bool) if has_experts else None,
        "packed_seq_params": DocumentSpec(b, s, is_trimmed=row_multiple(config) is not None),
    }


def apply_sft(model: nn.Module, batch: Batch) -> Tensor:
    """Run one stage: return token losses [1, n] on the last, hidden states on the others.

    Stages send as many tokens to each other as the longest rows have, so that the receiver knows
    the shape: positions after this micro-batch's tokens are zeros.
    """
    trimmed: tuple[int, int] | None = batch.get("trimmed")
    if trimmed is not None:
        decoder = get_attr_wrapped_model(model, "decoder")
        if (received := decoder.input_tensor) is not None:
            decoder.set_input_tensor(received[: len(received) * trimmed[0] // trimmed[1]])
    output = apply_rows(
        model,
        batch,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=batch["packed_seq_params"],
    )
    if trimmed is not None and not get_attr_wrapped_model(model, "post_process"):
        missing = len(output) * trimmed[1] // trimmed[0] - len(output)
        output = F.pad(output, (0, 0, 0, 0, 0, missing))
    return output


def apply_rows(model: nn.Module, batch: Batch, **arguments: Any) -> Tensor:
    """Run one stage on the rows of ``batch``; experts leave out their padding.

    ``routes`` of a batch [b, s, layers, k]: experts to replay, see `RouterReplay`.
    """
    found = {"padding_mask": batch["is_padding"], "expert_routes": batch.get("routes")}
    of_experts = {name: values for name, values in found.items() if values is not None}
    if of_experts and get_attr_wrapped_model(model, "config").sequence_parallel:
        tp = get_attr_wrapped_model(model, "pg_collection").tp
        of_experts = {name: x.chunk(tp.size(), 1)[tp.rank()] for name, x in of_experts.items()}
    output: Tensor = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        extra_block_kwargs=of_experts or None,
        **arguments,
    )
    return output


GPT_SFT = ModelImplementation(
    build=build_gpt_model,
    datasets=(SFTDataset, MockSFTDataset),
    dataset_config=sft_dataset_config,
    batch=sft_batch,
    apply=apply_sft,
    joins_rows=True,
    prepare_data=set_loss_share,
)
