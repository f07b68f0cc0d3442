"""Sizes of a wrapper, under its module path in Megatron-LM."""

from megatron.core.inference.v014.contexts import InferenceWrapperConfig as InferenceWrapperConfig
