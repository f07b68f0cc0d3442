"""Base class of contexts, under its module path in Megatron-LM."""

from megatron.core.inference.v014.contexts import BaseInferenceContext as BaseInferenceContext
