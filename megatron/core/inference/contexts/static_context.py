"""Cache of a script's own forward passes, under its module path in Megatron-LM."""

from megatron.core.inference.v014.contexts import StaticInferenceContext as StaticInferenceContext
