"""GPT from a RunConfig: the model and its data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
    get_imported_layer_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
    get_gpt_heterogeneous_layer_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.heterogeneous.heterogeneous_config import layer_shapes
from megatron.training.config.run import RunConfig
from megatron.training.data import get_blend_and_blend_per_split, reads_data
from megatron.training.runtime import Runtime
from megatron.training.tokenizer.checks import check_data


def build_gpt_model(
    config: RunConfig,
    *,
    vocab_size: int,
    padded_vocab_size: int,
    groups: ProcessGroupCollection | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    parallel_output: bool = True,
) -> GPTModel:
    """One pipeline stage of the GPT that ``config`` describes, on the current device."""
    lm = config.language_model
    spec = gpt_layer_spec(config)
    return GPTModel(
        config=config.model,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size,
        unpadded_vocab_size=None if lm.pad_vocab_in_loss else vocab_size,
        max_sequence_length=lm.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=lm.fp16_lm_cross_entropy,
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=not lm.untie_embeddings_and_output_weights,
        position_embedding_type=lm.position_embedding_type,
        rotary_percent=lm.rotary_percent,
        rotary_base=lm.rotary_base,
        rope_scaling=lm.use_rope_scaling,
        rope_scaling_factor=lm.rope_scaling_factor,
        seq_len_interpolation_factor=lm.rotary_seq_len_interpolation_factor,
        mtp_block_spec=get_gpt_mtp_block_spec(config.model, spec),
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def gpt_layer_spec(config: RunConfig) -> Any:
    """Which class fills which slot: --spec, else by --transformer-impl."""
    spec = config.language_model.spec
    if spec and spec[0] != "local":
        return get_imported_layer_spec(tuple(spec), config.model)
    if layer_shapes(config.model) is not None:
        return get_gpt_heterogeneous_layer_spec(config.model)
    if config.model.num_moe_experts is not None:
        return get_gpt_decoder_block_spec(config.model)
    if spec or config.model.transformer_impl == "local":
        return get_gpt_layer_local_spec(config=config.model)
    return get_gpt_layer_with_transformer_engine_spec(config=config.model)


def gpt_dataset_config(run: Runtime) -> GPTDatasetConfig:
    """How samples are cut from documents."""
    data = run.config.data
    blend, blend_per_split = get_blend_and_blend_per_split(data)
    return GPTDatasetConfig(
        random_seed=run.config.training.seed,
        sequence_length=data.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=data.split,
        multiple_validation_sets=run.config.validation.multiple_validation_sets,
        full_validation=run.config.validation.full_validation,
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        path_to_cache=data.data_cache_path,
        mmap_bin_files=data.mmap_bin_files,
        tokenizer=run.tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=data.create_attention_mask_in_dataloader,
        object_storage_cache_path=data.object_storage_cache_path,
        mid_level_dataset_surplus=data.mid_level_dataset_surplus,
    )


def build_gpt_datasets(run: Runtime, num_samples: Sequence[int | None]) -> tuple[Any, Any, Any]:
    """Train, validation and test set with at least ``num_samples`` samples each."""
    if run.config.data.dataloader_type == "external":
        raise ConfigError(
            "--dataloader-type external is for programs that bring their own loaders, and this one "
            "builds data sets: use single or cyclic"
        )
    config = gpt_dataset_config(run)
    if run.is_rank_0 and not run.config.data.mock_data:
        _check_data(run, config)
    cls = MockGPTDataset if run.config.data.mock_data else GPTDataset
    reads = reads_data(run)
    builder = BlendedMegatronDatasetBuilder(cls, list(num_samples), lambda: reads, config)
    train, valid, test = builder.build()
    if train is None and reads and not run.config.validation.skip_train:
        given = f"--split {config.split}" if config.split else "the data of each split"
        raise DataError(f"{given} leaves nothing to train on: give training data, or --skip-train")
    return train, valid, test


def _check_data(run: Runtime, config: GPTDatasetConfig) -> None:
    """On one rank: the data fits the tokenizer, the vocabulary and the flags that act on EOD."""
    data = run.config.data
    given = {
        "--reset-position-ids": data.reset_position_ids,
        "--reset-attention-mask": data.reset_attention_mask,
        "--eod-mask-loss": data.eod_mask_loss,
    }
    blends = [config.blend] if config.blend is not None else config.blend_per_split or []
    for prefix in {p: None for blend in blends if blend is not None for p in blend[0]}:
        check_data(
            GPTDataset.build_low_level_dataset(prefix, config),
            run.tokenizer,
            run.padded_vocab_size,
            [flag for flag, is_given in given.items() if is_given],
        )
