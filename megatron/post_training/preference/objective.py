"""The objectives of pairs of answers: datasets, batch tables, losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.reward_model import RewardModel
from megatron.post_training.preference.dataset import (
    MockPreferenceDataset,
    PreferenceDataset,
    PreferenceDatasetConfig,
)
from megatron.post_training.preference.losses import preference_loss, reward_loss
from megatron.post_training.preference.reference import references_of_data
from megatron.post_training.sft.objective import (
    GPT_SFT,
    set_loss_share,
    sft_batch,
    sft_settings,
    token_specs,
)
from megatron.training.config import run
from megatron.training.config.run import RunConfig
from megatron.training.models.gpt import gpt_layer_spec
from megatron.training.models.kind import BatchTable, language_arguments


def preference_dataset_config(config: RunConfig, **common: Any) -> PreferenceDatasetConfig:
    """Return the dataset config; ``common`` holds the arguments shared by all model kinds."""
    scores_answers = config.objective == run.REWARD
    settings = sft_settings(config, common["tokenizer"])
    return PreferenceDatasetConfig(scores_answers=scores_answers, **settings, **common)


def preference_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors that ``stage`` reads: those of --sft, and on the last stage more.

    is_rejected, and reference for direct preference optimization: see `PreferenceDataset`.
    """
    integers, reals = token_specs(config)
    is_last = stage == num_stages - 1
    has_reference = config.objective == run.DPO
    return {
        **sft_batch(config, stage, num_stages),
        "is_rejected": integers if is_last else None,
        "reference": reals if is_last and has_reference else None,
    }


def build_reward_model(
    config: RunConfig, *, vp_stage: int | None = None, **stage: Any
) -> RewardModel:
    """Build one pipeline stage of a reward model on the current device."""
    arguments = language_arguments(config, **stage)
    return RewardModel(
        config=config.model,
        transformer_layer_spec=gpt_layer_spec(config),
        vp_stage=vp_stage,
        **arguments | {"share_embeddings_and_output_weights": False},
    )


DPO = replace(
    GPT_SFT,
    datasets=(PreferenceDataset, MockPreferenceDataset),
    dataset_config=preference_dataset_config,
    batch=preference_batch,
    loss=preference_loss,
    prepare_data=references_of_data,
)
REWARD = replace(DPO, build=build_reward_model, loss=reward_loss, prepare_data=set_loss_share)
