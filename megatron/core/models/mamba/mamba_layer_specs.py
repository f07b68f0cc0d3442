"""Layer specs of a Mamba stack: the class of each submodule."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import (
    LOCAL,
    column_with_norm,
    get_mtp_layer_spec_for_backend,
    layer_of,
    transformer_engine_parts,
    without_attention,
    without_mlp,
)
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules, layer_spec_of
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionStack,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


def get_mamba_stack_spec(config: TransformerConfig | None = None) -> ModuleSpec:
    """Return the spec of a stack; without ``config`` every module is plain PyTorch."""
    is_local = config is None or config.transformer_impl == "local"
    backend = LOCAL if is_local else transformer_engine_parts(config)
    fused = column_with_norm(backend, config)
    dense = layer_of(backend, config=config)
    sparse = layer_of(backend, num_experts=1, config=config)  # any number: the config's
    column = fused or backend.column_parallel_linear()
    projections = MambaMixerSubmodules(column, backend.row_parallel_linear())
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=IdentityOp if fused else backend.layer_norm(),
                mixer=ModuleSpec(MambaMixer, submodules=projections),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=replace(dense, submodules=without_mlp(dense.submodules)),
        mlp_layer=replace(dense, submodules=without_attention(dense.submodules)),
        moe_layer=replace(sparse, submodules=without_attention(sparse.submodules)),
    )
    return ModuleSpec(module=MambaStack, submodules=layers)


def get_mamba_mtp_block_spec(
    config: TransformerConfig, stack: ModuleSpec
) -> MultiTokenPredictionBlockSubmodules | None:
    """Return the spec of multi-token prediction, with layers of ``stack``; None without it.

    Each depth has the layers of --mtp-hybrid-override-pattern.
    """
    pattern = config.mtp_hybrid_override_pattern
    if not config.mtp_num_layers or pattern is None:
        return None
    specs = [layer_spec_of(stack.submodules, letter) for letter in pattern]
    layers = ModuleSpec(MultiTokenPredictionStack, submodules=specs)
    one = get_mtp_layer_spec_for_backend(layers, LOCAL, LOCAL.linear())
    return MultiTokenPredictionBlockSubmodules([one] * config.mtp_num_layers)


mamba_stack_spec = get_mamba_stack_spec()  # as scripts and --spec name it
