"""A layer of a Mamba stack: norm, mixer, residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import ResidualLayer


@dataclass
class MambaLayerSubmodules:
    """Slots of the layer."""

    norm: Slot = IdentityOp
    mixer: Slot = IdentityOp
    mamba_bda: Slot = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


class MambaLayer(ResidualLayer):
    """A mixer, added to the residual stream."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int = 1,
        residual_in_fp32: bool = False,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """``layer_number`` counts from 1 over the whole model; the config says the residual's."""
        del residual_in_fp32
        super().__init__(config, layer_number, None, pg_collection=pg_collection)
        self.norm = self.build_norm(submodules.norm)
        self.mixer = build_module(
            submodules.mixer, config=config, d_model=config.hidden_size, offered=self.offered
        )
        self.mamba_bda = build_module(submodules.mamba_bda)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        inference_context: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **of_attention: object,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, h]; what attention layers are told is of no use here."""
        mix = partial(
            self.mixer, inference_context=inference_context, packed_seq_params=packed_seq_params
        )
        return self.add_part(mix, hidden_states, (self.norm, None), self.mamba_bda), None
