"""Wrapper of vision-language models, under its module path in Megatron-LM."""

from megatron.core.inference.v014.wrappers import VLMInferenceWrapper as VLMInferenceWrapper
