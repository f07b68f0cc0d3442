"""Hybrid stack of Mamba, attention, MLP and MoE layers: the part of one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.packed_seq_params import AttentionMask
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_hybrid_layer_allocation import (
    ATTENTION,
    EXPERTS,
    KINDS,
    MAMBA,
    MLP,
    layer_pattern,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.spec_utils import Slot
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MambaStackSubmodules:
    """Specs of the layer kinds."""

    mamba_layer: Slot = IdentityOp
    attention_layer: Slot = IdentityOp
    mlp_layer: Slot = IdentityOp
    moe_layer: Slot = IdentityOp


class MambaStack(TransformerBlock):
    """The layers of one pipeline stage, whose kinds a pattern gives; the last stage has a norm."""

    layers_are_alike = False

    @library_call(
        "config submodules residual_in_fp32 pre_process hybrid_attention_ratio hybrid_mlp_ratio "
        "hybrid_override_pattern post_layer_norm post_process device dtype model_comm_pgs",
        like=TransformerBlock.__init__,
        unused="residual_in_fp32 device dtype",
    )
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaStackSubmodules,
        *,
        hybrid_attention_ratio: float = 0.0,
        hybrid_mlp_ratio: float = 0.0,
        hybrid_override_pattern: str | None = None,
        pg_collection: ProcessGroupCollection,
        **of_block: Any,
    ) -> None:
        """Build the layers; see `layer_pattern` for the pattern.

        ``config.fp32_residual_connection`` decides the precision of the residual stream.
        """
        pattern = layer_pattern(
            config.num_layers, hybrid_attention_ratio, hybrid_mlp_ratio, hybrid_override_pattern
        )
        super().__init__(
            config,
            TransformerBlockSubmodules([layer_spec_of(submodules, p) for p in pattern], Norm),
            pg_collection=pg_collection,
            **of_block,
        )

    @library_call("... inference_context rotary_pos_emb")
    def forward(
        self, hidden_states: Any, attention_mask: AttentionMask | None = None, **more: Any
    ) -> Tensor:
        """Run the layers; see `TransformerBlock.forward`."""
        return super().forward(hidden_states, attention_mask, **more)


def layer_spec_of(submodules: MambaStackSubmodules, letter: str) -> Slot:
    """Return the spec of the layer that a letter of the pattern stands for.  Raises ConfigError."""
    layers = {
        MAMBA: submodules.mamba_layer,
        ATTENTION: submodules.attention_layer,
        MLP: submodules.mlp_layer,
        EXPERTS: submodules.moe_layer,
    }
    if layers[letter] is IdentityOp:
        raise ConfigError(
            f"the pattern asks for {KINDS[letter]} layers, {letter}, and the spec of the stack has "
            "none: fill that slot of MambaStackSubmodules"
        )
    return layers[letter]
