"""The path under which scripts import the norm."""

from megatron.core.optional import lazy_exports

__getattr__ = lazy_exports(__name__, {"FusedLayerNorm": "megatron.core.transformer.norms"})
