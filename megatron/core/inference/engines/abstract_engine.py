"""Base class of engines, under its module path in Megatron-LM."""

from megatron.core.inference.v014.engines import AbstractEngine as AbstractEngine
