"""The model kinds by name, those of user code included."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron.core.config.errors import ConfigError
from megatron.training.config.language_model import MODEL_KINDS, LanguageModelConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import ModelImplementation, ModelKind


def register_model_kind(name: str, kind: ModelKind) -> None:
    """Add a kind for --model-kind ``name``.  Raises ConfigError for a name that is taken."""
    if not isinstance(kind, ModelKind):
        raise ConfigError(f"register_model_kind({name!r}, ...): {kind!r} is no ModelKind")
    MODEL_KINDS.register(name, kind)


def model_kind(name: str | None) -> ModelKind:
    """The kind that --model-kind ``name`` selects, by default GPT.  Raises ConfigError."""
    kind = MODEL_KINDS.find(name or LanguageModelConfig.model_kind)
    assert isinstance(kind, ModelKind), "register_model_kind() has checked it"
    return kind


def model_kind_of(config: RunConfig) -> ModelKind:
    """The kind of the model that ``config`` describes."""
    return model_kind(config.language_model.model_kind)


def implementation_of(config: RunConfig) -> ModelImplementation:
    """How the model that ``config`` describes, its data and its batches are built."""
    return model_kind_of(config).load()


def build_model_stage(
    config: RunConfig, *, vp_stage: int | None = None, **arguments: Any
) -> nn.Module:
    """One stage of the model; see `ModelImplementation` for the arguments."""
    return implementation_of(config).build(config, vp_stage=vp_stage, **arguments)
