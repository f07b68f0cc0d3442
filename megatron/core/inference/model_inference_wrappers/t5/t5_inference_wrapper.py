"""Wrapper of encoder-decoder models, under its module path in Megatron-LM."""

from megatron.core.inference.v014.wrappers import T5InferenceWrapper as T5InferenceWrapper
