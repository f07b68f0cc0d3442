"""Engines that turn prompts into tokens."""

from megatron.core.inference.engines.static_engine import generate as generate
