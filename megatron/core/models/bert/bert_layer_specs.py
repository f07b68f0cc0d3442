"""Which class fills which slot of a BERT layer: those of GPT, and every token sees every other."""

from __future__ import annotations

from megatron.core.enums import AttnMaskType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def get_bert_layer_local_spec(config: TransformerConfig | None = None) -> ModuleSpec:
    """A layer of plain torch."""
    return _bidirectional(get_gpt_layer_local_spec(config=config))


def get_bert_layer_with_transformer_engine_spec(
    config: TransformerConfig | None = None,
) -> ModuleSpec:
    """A layer of Transformer Engine's modules; of plain torch, with one warning, without it."""
    return _bidirectional(get_gpt_layer_with_transformer_engine_spec(config=config))


def _bidirectional(spec: ModuleSpec) -> ModuleSpec:
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    return spec


bert_layer_local_spec = get_bert_layer_local_spec()


def __getattr__(name: str) -> ModuleSpec:
    """``bert_layer_with_transformer_engine_spec``: made when asked for, because it may warn."""
    if name != "bert_layer_with_transformer_engine_spec":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return get_bert_layer_with_transformer_engine_spec()
