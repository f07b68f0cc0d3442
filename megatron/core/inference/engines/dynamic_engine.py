"""Engine with continuous batching, under its module path in Megatron-LM."""

from megatron.core.inference.v014.engines import DynamicInferenceEngine as DynamicInferenceEngine
