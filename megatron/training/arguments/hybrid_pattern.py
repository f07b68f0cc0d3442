"""Layers of a hybrid model, as its flags describe them."""

from __future__ import annotations

from megatron.core.config.errors import ConfigError
from megatron.core.ssm.mamba_hybrid_layer_allocation import layer_pattern
from megatron.training.config.run import RunConfig
from megatron.training.models.registry import model_kind_of


def hybrid_pattern(run: RunConfig) -> str:
    """Return the letters of the layers; "" for other models and for an invalid pattern."""
    lm = run.language_model
    if not model_kind_of(run).is_hybrid or not run.model.num_layers:
        return ""
    asked = lm.hybrid_attention_ratio, lm.hybrid_mlp_ratio, lm.hybrid_override_pattern
    try:
        return layer_pattern(run.model.num_layers, *asked)
    except ConfigError:
        return ""
