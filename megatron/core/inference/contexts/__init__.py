"""Caches of keys and values for text generation."""

from megatron.core.inference.contexts.static_context import (
    StaticInferenceContext as StaticInferenceContext,
)
