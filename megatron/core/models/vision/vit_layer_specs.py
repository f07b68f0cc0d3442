"""Layer specs of vision transformers: those of GPT in which each patch attends to all others."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.enums import AttnMaskType
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.params.param_init import Init, new_parameter, param_info_for
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


class LayerScale(nn.Module):
    """A learned factor for each channel of a sublayer's output, in place of a norm (InternViT)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 0.0) -> None:
        super().__init__()
        info = param_info_for(
            (hidden_size,), Init("ones"), sequence_parallel=config.sequence_parallel
        )
        self.weight = new_parameter((hidden_size,), config.params_dtype, info)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., h] -> [..., h]."""
        return x * self.weight


def get_vit_layer_with_local_spec(
    config: TransformerConfig | None = None, *, has_layer_scale: bool = False
) -> ModuleSpec:
    """Return a spec whose modules are plain PyTorch."""
    return _without_mask(get_gpt_layer_local_spec(config=config), has_layer_scale)


def get_vit_layer_with_transformer_engine_spec(
    config: TransformerConfig | None = None, *, has_layer_scale: bool = False
) -> ModuleSpec:
    """Return a spec with Transformer Engine's modules; without it, warn and use PyTorch."""
    return _without_mask(get_gpt_layer_with_transformer_engine_spec(config=config), has_layer_scale)


def _without_mask(spec: ModuleSpec, has_layer_scale: bool) -> ModuleSpec:
    spec.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    if has_layer_scale:
        spec.submodules.post_self_attn_layernorm = LayerScale
        spec.submodules.post_mlp_layernorm = LayerScale
    return spec
