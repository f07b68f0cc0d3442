"""Build GPT, Mamba and hybrid models, their datasets and batch table from a RunConfig."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.fill_in_middle import FillInMiddle
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt.gpt_layer_specs import (
    LOCAL,
    decoder_block_of,
    get_imported_layer_spec,
    layer_of,
    mtp_block_of,
    transformer_engine_parts,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    heterogeneous_block_of,
)
from megatron.core.models.mamba import mamba_layer_specs
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.core.transformer.layer_layout import layer_ranges
from megatron.training.config.data import DataConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.attention_request import documents_are_bounds
from megatron.training.models.kind import (
    Batch,
    BatchTable,
    DocumentSpec,
    ModelImplementation,
    TensorSpec,
    language_arguments,
)
from megatron.training.tokenizer.base import MegatronTokenizer


def build_gpt_model(config: RunConfig, *, vp_stage: int | None = None, **stage: Any) -> GPTModel:
    """Build one pipeline stage of GPT on the current device."""
    spec = gpt_layer_spec(config)
    return GPTModel(
        config=config.model,
        transformer_layer_spec=spec,
        mtp_block_spec=mtp_block_of(LOCAL, config.model, spec),
        vp_stage=vp_stage,
        **language_arguments(config, **stage),
    )


def gpt_layer_spec(config: RunConfig) -> Any:
    """Return the layer spec: the one --spec names, otherwise that of --transformer-impl."""
    spec = config.language_model.spec
    if spec and spec[0] != "local":
        return get_imported_layer_spec(tuple(spec), config.model)
    is_local = bool(spec) or config.model.transformer_impl == "local"
    parts = LOCAL if is_local else transformer_engine_parts(config.model)
    if layer_shapes(config.model) is not None:
        return heterogeneous_block_of(parts, config.model)
    m = config.model
    if m.num_moe_experts is not None or m.experimental_attention_variant is not None:
        return decoder_block_of(parts, config.model)
    return layer_of(parts, config=config.model)


def gpt_dataset_config(config: RunConfig, **common: Any) -> GPTDatasetConfig:
    """Return the GPT dataset config; ``common`` holds the arguments shared by all model kinds."""
    return GPTDatasetConfig(
        index_free=config.data.index_free,
        pack_documents=config.data.pack_documents,
        fill_in_middle=_fill_in_middle(config.data, common.get("tokenizer")),
        **text_arguments(config),
        **common,
    )


def _fill_in_middle(data: DataConfig, tokenizer: MegatronTokenizer | None) -> FillInMiddle | None:
    """Return the settings of --fim-data.  Raises ConfigError for a token that does not exist."""
    if not data.fim_data:
        return None
    assert tokenizer is not None, "a run has a tokenizer"
    vocabulary = tokenizer.vocab
    missing = []

    def id_of(flag: str, token: str) -> int:
        if token not in vocabulary:
            missing.append(f"{flag} {token}")
        return vocabulary.get(token, -1)

    rate = data.fim_fragment_rate
    start = data.fim_no_prefix
    split = data.fim_split_sample
    settings = FillInMiddle(
        data.fim_rate,
        data.fim_spm_rate,
        prefix=id_of("--fim-prefix-token", data.fim_prefix_token),
        middle=id_of("--fim-middle-token", data.fim_middle_token),
        suffix=id_of("--fim-suffix-token", data.fim_suffix_token),
        eod=tokenizer.eod,
        split=None if split is None else id_of("--fim-split-sample", split),
        fragment_rate=data.fim_rate if rate is None else rate,
        no_prefix=tuple(tokenizer.tokenize_plain(start)) if start else (),
    )
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: the vocabulary of {tokenizer.name} has no such token; name "
            "tokens that it has, or add them to the tokenizer's files"
        )
    return settings


def text_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of a dataset config that say what samples of a text hold."""
    data = config.data
    return {
        "reset_position_ids": data.reset_position_ids,
        "reset_attention_mask": data.reset_attention_mask,
        "eod_mask_loss": data.eod_mask_loss,
        # Nothing reads a mask that is only causal.
        "create_attention_mask": data.create_attention_mask_in_dataloader
        and data.reset_attention_mask,
        "mask_as_bounds": documents_are_bounds(config),
    }


def gpt_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads, None for those it does not.

    tokens, labels, loss_mask and position_ids are [b, s], attention_mask is [b, 1, s, s], or the
    bounds of documents where attention takes them.  The first stage reads tokens and positions, the
    last one labels and loss mask, and tokens too for multi-token prediction; stages with layers of
    hash routing read tokens.  With --reset-attention-mask every stage reads all.  A purely causal
    mask is never read: attention is causal without it, and faster.
    """
    mask: TensorSpec | DocumentSpec | None = None
    b, s = config.training.micro_batch_size, config.data.seq_length
    has_mask = config.data.reset_attention_mask
    if has_mask:
        bounds = DocumentSpec(b, s)
        mask = bounds if documents_are_bounds(config) else bounds.mask
    is_first, is_last = stage == 0, stage == num_stages - 1
    ids, weights = TensorSpec(torch.int64, (b, s)), TensorSpec(torch.float32, (b, s))
    needs_ids = is_last and config.model.mtp_num_layers is not None
    if num_hashed := config.model.moe_num_hash_layers:
        ranks = config.model.pipeline_model_parallel_size
        needs_ids |= layer_ranges(config.model, ranks)[stage].start < num_hashed
    return {
        "tokens": ids if is_first or needs_ids or has_mask else None,
        "labels": ids if is_last or has_mask else None,
        "loss_mask": weights if is_last or has_mask else None,
        "attention_mask": mask,
        "position_ids": ids if is_first or has_mask else None,
    }


def apply_gpt(model: nn.Module, batch: Batch) -> Tensor:
    """Run one stage: return token losses [b, s] on the last stage, hidden states on the others."""
    losses: Tensor = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses


GPT = ModelImplementation(
    build=build_gpt_model,
    datasets=(GPTDataset, MockGPTDataset),
    dataset_config=gpt_dataset_config,
    batch=gpt_batch,
    apply=apply_gpt,
)


def build_mamba_model(
    config: RunConfig, *, vp_stage: int | None = None, **stage: Any
) -> MambaModel:
    """Build one pipeline stage of the model on the current device."""
    lm = config.language_model
    spec = mamba_spec(config)
    return MambaModel(
        config=config.model,
        mamba_stack_spec=spec,
        mtp_block_spec=mamba_layer_specs.get_mamba_mtp_block_spec(config.model, spec),
        hybrid_attention_ratio=lm.hybrid_attention_ratio,
        hybrid_mlp_ratio=lm.hybrid_mlp_ratio,
        hybrid_override_pattern=lm.hybrid_override_pattern,
        vp_stage=vp_stage,
        **language_arguments(config, **stage),
    )


def mamba_spec(config: RunConfig) -> Any:
    """Return the stack spec that --spec imports.

    Without --spec, or if it names this project's own spec, return a spec that follows the flags.
    """
    path = config.language_model.spec
    if path and path[0] != "local":
        spec = get_imported_layer_spec(tuple(path), config.model)
        if spec is not mamba_layer_specs.mamba_stack_spec:
            return spec
    return mamba_layer_specs.get_mamba_stack_spec(config.model)


MAMBA = replace(GPT, build=build_mamba_model)
