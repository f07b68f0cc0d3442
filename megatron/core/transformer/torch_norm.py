"""Compatibility module: Megatron-LM's import path of the norm."""

from megatron.core.transformer.norms import WrappedTorchNorm as WrappedTorchNorm
