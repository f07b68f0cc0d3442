"""Former name of a static context, under its module path in Megatron-LM."""

from megatron.core.inference.v014.contexts import InferenceParams as InferenceParams
