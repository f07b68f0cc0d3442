"""Configuration of MiMo."""

from megatron.core.models.mimo.config.base_configs import MimoModelConfig as MimoModelConfig
