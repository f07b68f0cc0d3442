"""Mamba and hybrid models from a RunConfig; data and batches are those of a GPT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_imported_layer_spec
from megatron.core.models.mamba import mamba_layer_specs
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config.run import RunConfig
from megatron.training.models.gpt import GPT


def build_mamba_model(
    config: RunConfig,
    *,
    vocab_size: int,
    padded_vocab_size: int,
    groups: ProcessGroupCollection | None = None,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    parallel_output: bool = True,
) -> MambaModel:
    """One pipeline stage of the model that ``config`` describes, on the current device."""
    lm = config.language_model
    return MambaModel(
        config=config.model,
        mamba_stack_spec=mamba_spec(config),
        vocab_size=padded_vocab_size,
        unpadded_vocab_size=None if lm.pad_vocab_in_loss else vocab_size,
        max_sequence_length=lm.max_position_embeddings,
        pre_process=pre_process,
        hybrid_attention_ratio=lm.hybrid_attention_ratio,
        hybrid_mlp_ratio=lm.hybrid_mlp_ratio,
        hybrid_override_pattern=lm.hybrid_override_pattern,
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
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def mamba_spec(config: RunConfig) -> Any:
    """The stack that --spec names; the one of this project follows the flags."""
    path = config.language_model.spec
    if path and path[0] != "local":
        spec = get_imported_layer_spec(tuple(path), config.model)
        if spec is not mamba_layer_specs.mamba_stack_spec:
            return spec
    return mamba_layer_specs.get_mamba_stack_spec(config.model)


MAMBA = replace(GPT, build=build_mamba_model)
