"""The kinds by their name, and a model of whichever kind a RunConfig is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron.core.lazy import LazyTable
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import ModelKind
from megatron.training.runtime import Runtime

_HOME = "megatron.training.models"
KINDS: Mapping[str, ModelKind] = LazyTable(
    {kind: f"{_HOME}.{kind}.{kind.upper()}" for kind in ("gpt", "bert", "mamba", "t5")}
)


def kind_of(config: RunConfig) -> ModelKind:
    """What --model-kind names."""
    return KINDS[config.language_model.model_kind or "gpt"]


def build_model(config: RunConfig, *, vp_stage: int | None = None, **arguments: Any) -> nn.Module:
    """One stage of the model that ``config`` describes; see `ModelKind` for the arguments."""
    return kind_of(config).build(config, vp_stage=vp_stage, **arguments)


def build_stage(run: Runtime, *, vp_stage: int | None = None, **arguments: Any) -> Any:
    """This rank's stage: with ``pre_process`` and ``post_process`` it is the first, the last."""
    return build_model(
        run.config,
        vocab_size=run.tokenizer.vocab_size,
        padded_vocab_size=run.padded_vocab_size,
        groups=run.groups,
        vp_stage=vp_stage,
        **arguments,
    )
