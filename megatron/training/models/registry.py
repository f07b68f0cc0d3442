"""The kinds by their name, and a model of whichever kind a RunConfig is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron.core.lazy import LazyTable
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import ModelKind

_HOME = "megatron.training.models"
KINDS: Mapping[str, ModelKind] = LazyTable(
    {kind: f"{_HOME}.{kind}.{kind.upper()}" for kind in ("gpt", "bert", "mamba", "t5")}
)


def model_kind_of(config: RunConfig) -> ModelKind:
    """What --model-kind names."""
    return KINDS[config.language_model.model_kind or "gpt"]


def build_model_stage(
    config: RunConfig, *, vp_stage: int | None = None, **arguments: Any
) -> nn.Module:
    """One stage of the model that ``config`` describes; see `ModelKind` for the arguments."""
    return model_kind_of(config).build(config, vp_stage=vp_stage, **arguments)
