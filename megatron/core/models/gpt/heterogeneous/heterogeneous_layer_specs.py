"""Specs of a GPT whose layers may differ in shape."""

from __future__ import annotations

from megatron.core.config import states
from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def get_gpt_heterogeneous_layer_spec(
    config: TransformerConfig, use_te: bool = False
) -> TransformerBlockSubmodules:
    """A spec for every layer, all alike where the config describes no differences.

    Raises ConfigError where it does.
    """
    if (
        config.heterogeneous_layers_config_path is not None
        or config.heterogeneous_layers_config_encoded_json
    ):
        raise ConfigError(f"--heterogeneous-layers-config-path: {states.HETEROGENEOUS}")
    return get_gpt_decoder_block_spec(config, use_te)
