"""Which class fills which slot of a GPT layer."""

from __future__ import annotations

import logging
from functools import lru_cache

from megatron.core import optional
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.norms import HeadsWideRMSNorm, Norm
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

logger = logging.getLogger(__name__)


def get_gpt_layer_local_spec(
    config: TransformerConfig | None = None,
    *,
    qk_layernorm: bool | None = None,
    normalization: str | None = None,
) -> ModuleSpec:
    """A layer of plain torch.  ``normalization`` is the config's; it is accepted for scripts."""
    del normalization
    if qk_layernorm is None:
        qk_layernorm = config is not None and config.qk_layernorm
    is_wide = config is not None and config.qk_layernorm_full_width
    placement = "pre" if config is None else config.layer_norm_placement
    before = IdentityOp if placement == "post" else Norm
    after = IdentityOp if placement == "pre" else Norm
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=before,
            self_attention=_self_attention(qk_layernorm, is_wide),
            self_attn_bda=get_bias_dropout_add,
            post_self_attn_layernorm=after,
            pre_mlp_layernorm=before,
            mlp=_mlp(),
            mlp_bda=get_bias_dropout_add,
            post_mlp_layernorm=after,
        ),
    )


def _self_attention(qk_layernorm: bool, is_wide: bool) -> ModuleSpec:
    norm = HeadsWideRMSNorm if is_wide else Norm
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm if qk_layernorm or is_wide else None,
            k_layernorm=norm if qk_layernorm or is_wide else None,
        ),
    )


def _mlp() -> ModuleSpec:
    return ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )


def get_gpt_layer_with_transformer_engine_spec(
    config: TransformerConfig | None = None,
    *,
    qk_layernorm: bool | None = None,
) -> ModuleSpec:
    """A layer of Transformer Engine's modules; of plain torch, with one warning, without it."""
    _warn_without_transformer_engine()
    return get_gpt_layer_local_spec(config, qk_layernorm=qk_layernorm)


@lru_cache(maxsize=1)
def _warn_without_transformer_engine() -> None:
    reason = optional.why_missing("transformer_engine")
    why = reason or "its layers are not used by this release"
    logger.warning("--transformer-impl transformer_engine falls back to local: %s", why)


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool = False,
    normalization: str | None = None,
) -> TransformerBlockSubmodules:
    """A spec for every layer of the model."""
    if use_transformer_engine:
        _warn_without_transformer_engine()
    layer = get_gpt_layer_local_spec(config, normalization=normalization)
    return TransformerBlockSubmodules([layer] * config.num_layers, Norm)
