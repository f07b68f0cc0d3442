"""Base class of wrappers, under its module path in Megatron-LM."""

from megatron.core.inference.v014.wrappers import (
    AbstractModelInferenceWrapper as AbstractModelInferenceWrapper,
)
