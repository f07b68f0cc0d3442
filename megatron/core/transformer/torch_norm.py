"""The path under which scripts import the norm."""

from megatron.core.transformer.norms import WrappedTorchNorm as WrappedTorchNorm
