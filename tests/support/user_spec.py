"""Layers of a user's own for ``--spec``, described as for Megatron-LM core_v0.14."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)


class HalfMLP(MLP):
    """Adds half of what an MLP adds."""

    def forward(self, hidden_states, *args, **kwargs):
        output, bias = super().forward(hidden_states, *args, **kwargs)
        return 0.5 * output, None if bias is None else 0.5 * bias


class CountingLayer(TransformerLayer):
    """Says its number while it is built."""

    built = []

    def __init__(self, config, submodules, layer_number=1, **kwargs):
        super().__init__(config, submodules, layer_number=layer_number, **kwargs)
        self.built.append(layer_number)


def layer_of(mlp):
    return ModuleSpec(
        module=CountingLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=ModuleSpec(
                module=mlp,
                submodules=MLPSubmodules(
                    linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.layer_norm_"},
        ),
    )


plain_layer = layer_of(MLP)
half_layer = layer_of(HalfMLP)


def half_layer_function():
    return half_layer


def layer_for(config):
    return half_layer if config.num_layers == 2 else plain_layer
