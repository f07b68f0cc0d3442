"""Registry of model kinds by name, including those that user code registers."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron.core.config.errors import ConfigError
from megatron.core.transformer.layer_layout import layer_ranges
from megatron.training.config.language_model import MODEL_KINDS, LanguageModelConfig
from megatron.training.config.run import PRETRAINING, RunConfig
from megatron.training.models.kind import (
    Layer,
    ModelImplementation,
    ModelKind,
    stages_of_encoder_decoder,
)

# Import path of the ModelImplementation of each objective beside pretraining, and of the function
# of each method of distillation that changes one.
_OBJECTIVES: dict[str, str] = {}


def register_model_kind(name: str, kind: ModelKind) -> None:
    """Register ``kind`` for --model-kind ``name``.  Raise ConfigError if the name is taken."""
    if not isinstance(kind, ModelKind):
        raise ConfigError(f"register_model_kind({name!r}, ...): {kind!r} is no ModelKind")
    MODEL_KINDS.register(name, kind)


def model_kind(name: str | None) -> ModelKind:
    """Return the kind of --model-kind ``name``; None selects the default, GPT.

    Raise ConfigError for an unknown name.
    """
    kind = MODEL_KINDS.find(name or LanguageModelConfig.model_kind)
    assert isinstance(kind, ModelKind), "register_model_kind() has checked it"
    return kind


def model_kind_of(config: RunConfig) -> ModelKind:
    """Return the model kind that ``config`` selects."""
    return model_kind(config.language_model.model_kind)


def register_objectives(paths: Mapping[str, str]) -> None:
    """Register objectives, methods of distillation and callbacks: name -> ``package.module:NAME``.

    What a path names is imported when a run needs it.
    """
    _OBJECTIVES.update(paths)


def implementation_of(config: RunConfig) -> ModelImplementation:
    """Return the implementation of the model kind and objective that ``config`` selects.

    Distillation changes that of any objective.  Raise ConfigError if the program has not registered
    the objective.
    """
    kind = model_kind_of(config)
    found = kind.load() if config.objective == PRETRAINING else registered(config.objective)
    if (method := config.distillation.method) is not None:
        found = registered(method)(found)
    assert isinstance(found, ModelImplementation), f"{found} is no ModelImplementation"
    return found


def registered(name: str) -> Any:
    """Import and return what `register_objectives` has registered.  Raise ConfigError."""
    if name not in _OBJECTIVES:
        raise ConfigError(
            f"the flags select {name!r}, which this program has not registered: add "
            "`import megatron.post_training` to it, or --import-module megatron.post_training"
        )
    return pkgutil.resolve_name(_OBJECTIVES[name])


def build_model_stage(
    config: RunConfig, *, vp_stage: int | None = None, **arguments: Any
) -> nn.Module:
    """Build one pipeline stage; `ModelImplementation` lists the arguments."""
    return implementation_of(config).build(config, vp_stage=vp_stage, **arguments)


def shape_of_microbatch(config: RunConfig) -> tuple[int, int]:
    """Return the numbers of tokens of a row and of rows in what stages send to each other."""
    tokens = config.data.seq_length
    rows = config.training.micro_batch_size
    return (tokens * rows, 1) if implementation_of(config).joins_rows else (tokens, rows)


def layers_of(config: RunConfig) -> list[Layer]:
    """Return every layer in order; layers of multi-token prediction follow the decoder's."""
    return model_kind_of(config).layers(config)


def layers_of_stages(config: RunConfig) -> tuple[range, ...]:
    """Return the indices in `layers_of` that each virtual stage holds, without MTP layers."""
    if model_kind_of(config).has_encoder:
        return stages_of_encoder_decoder(config)
    return layer_ranges(config.model, config.model.pipeline_model_parallel_size)
