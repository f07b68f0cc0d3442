"""Engines that generate tokens from prompts."""

from megatron.core.inference.engines.static_engine import generate as generate
