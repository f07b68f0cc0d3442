"""Compatibility module: Megatron-LM's import path of the transformer enums."""

from megatron.core.enums import AttnBackend as AttnBackend
from megatron.core.enums import AttnMaskType as AttnMaskType
from megatron.core.enums import AttnType as AttnType
from megatron.core.enums import LayerType as LayerType
from megatron.core.enums import ModelType as ModelType
