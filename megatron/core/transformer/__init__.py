"""Transformer layers."""

from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "TransformerConfig": "megatron.core.transformer.transformer_config",
        "TransformerLayer": "megatron.core.transformer.transformer_layer",
        "TransformerBlock": "megatron.core.transformer.transformer_block",
        "MegatronModule": "megatron.core.transformer.module",
        "ModuleSpec": "megatron.core.transformer.spec_utils",
    },
)
