"""A layer of a Mamba stack that is an MLP alone: a transformer layer with other slots empty."""

from megatron.core.transformer.transformer_layer import TransformerLayer as MLPLayer

__all__ = ["MLPLayer"]
