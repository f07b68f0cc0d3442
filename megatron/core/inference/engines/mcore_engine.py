"""The name of `StaticInferenceEngine` before Megatron Core 0.12."""

from megatron.core.inference.engines.static_engine import StaticInferenceEngine

MCoreEngine = StaticInferenceEngine
