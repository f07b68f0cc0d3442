"""Caches of keys and values for text generation."""

from megatron.core.inference.contexts.base_context import (
    BaseInferenceContext as BaseInferenceContext,
)
from megatron.core.inference.contexts.dynamic_context import (
    DynamicInferenceContext as DynamicInferenceContext,
)
from megatron.core.inference.contexts.static_context import (
    StaticInferenceContext as StaticInferenceContext,
)
