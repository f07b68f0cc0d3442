"""MLP layer of a hybrid stack: a transformer layer without attention submodules."""

from megatron.core.transformer.transformer_layer import TransformerLayer as MLPLayer

__all__ = ["MLPLayer"]
