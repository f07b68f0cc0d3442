"""Layer specs of BERT: those of GPT with bidirectional attention."""

from __future__ import annotations

from megatron.core.enums import AttnMaskType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def get_bert_layer_local_spec(config: TransformerConfig | None = None) -> ModuleSpec:
    """Return a spec whose modules are plain PyTorch."""
    return _bidirectional(get_gpt_layer_local_spec(config=config))


def get_bert_layer_with_transformer_engine_spec(
    config: TransformerConfig | None = None,
) -> ModuleSpec:
    """Return a spec with Transformer Engine's modules; without it, warn and use PyTorch."""
    return _bidirectional(get_gpt_layer_with_transformer_engine_spec(config=config))


def _bidirectional(spec: ModuleSpec) -> ModuleSpec:
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    return spec


bert_layer_local_spec = get_bert_layer_local_spec()


def __getattr__(name: str) -> ModuleSpec:
    """Build ``bert_layer_with_transformer_engine_spec`` on first access, because it may warn."""
    if name != "bert_layer_with_transformer_engine_spec":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return get_bert_layer_with_transformer_engine_spec()
