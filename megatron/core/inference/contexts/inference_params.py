"""The name of `StaticInferenceContext` before Megatron Core 0.12."""

from __future__ import annotations

import warnings

from megatron.core.inference.contexts.static_context import StaticInferenceContext


class InferenceParams(StaticInferenceContext):
    """A `StaticInferenceContext`, with a warning."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        warnings.warn(
            "InferenceParams is now called StaticInferenceContext "
            "(megatron.core.inference.contexts)",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(max_batch_size, max_sequence_length)
