"""The name of `StaticInferenceEngine` before Megatron Core 0.12."""

from megatron.core.inference.v014.engines import StaticInferenceEngine

MCoreEngine = StaticInferenceEngine
