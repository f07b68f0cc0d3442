"""Engine for prompts that are known beforehand, under its module path in Megatron-LM."""

from megatron.core.inference.v014.engines import StaticInferenceEngine as StaticInferenceEngine
