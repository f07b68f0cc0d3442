"""Build Mamba and hybrid models from a RunConfig; data and batch table are those of GPT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_imported_layer_spec
from megatron.core.models.mamba import mamba_layer_specs
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.training.config.run import RunConfig
from megatron.training.models.gpt import GPT
from megatron.training.models.kind import language_arguments


def build_mamba_model(
    config: RunConfig, *, vp_stage: int | None = None, **stage: Any
) -> MambaModel:
    """Build one pipeline stage of the model on the current device."""
    lm = config.language_model
    return MambaModel(
        config=config.model,
        mamba_stack_spec=mamba_spec(config),
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
