"""Engines, under its module path in Megatron-LM."""

from megatron.core.inference.v014.engines import AbstractEngine as AbstractEngine
from megatron.core.inference.v014.engines import DynamicInferenceEngine as DynamicInferenceEngine
from megatron.core.inference.v014.engines import StaticInferenceEngine as StaticInferenceEngine
