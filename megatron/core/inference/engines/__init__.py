"""Engines under their names in Megatron-LM; `paged_engine` does their work."""

from megatron.core.inference.engines.abstract_engine import AbstractEngine as AbstractEngine
from megatron.core.inference.engines.dynamic_engine import (
    DynamicInferenceEngine as DynamicInferenceEngine,
)
from megatron.core.inference.engines.static_engine import (
    StaticInferenceEngine as StaticInferenceEngine,
)
