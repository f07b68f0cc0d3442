"""Mamba layer: norm, mixer, residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.norms import Stream, summed
from megatron.core.transformer.spec_utils import Slot, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import ResidualLayer
from megatron.core.utils import deprecate_inference_params


@dataclass
class MambaLayerSubmodules:
    """Submodules of the layer."""

    norm: Slot = IdentityOp
    mixer: Slot = IdentityOp
    mamba_bda: Slot = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


class MambaLayer(ResidualLayer):
    """Layer with a Mamba-2 mixer, whose output is added to the residual stream."""

    @library_call("... residual_in_fp32 model_comm_pgs", unused="residual_in_fp32")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaLayerSubmodules,
        layer_number: int = 1,
        *,
        pg_collection: ProcessGroupCollection,
        pp_layer_offset: int = 0,
    ) -> None:
        """Build the submodules.

        ``layer_number`` counts from 1; there are ``pp_layer_offset`` layers before the first one.
        ``config.fp32_residual_connection`` decides the precision of the residual stream.
        """
        super().__init__(
            config,
            layer_number + pp_layer_offset,
            None,
            pg_collection=pg_collection,
            keys_map=submodules.sharded_state_dict_keys_map,
        )
        self.norm = self.build_norm(submodules.norm)
        self.mixer = build_module(
            submodules.mixer, config=config, d_model=config.hidden_size, offered=self.offered
        )
        self.mamba_bda = build_module(submodules.mamba_bda)

    def forward(
        self,
        hidden_states: Stream,
        attention_mask: Tensor | None = None,
        inference_context: KVCache | None = None,
        rotary_pos_emb: object = None,
        *,
        inference_params: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        defers_sum: bool = False,
        **of_attention: object,
    ) -> tuple[Stream, Tensor | None]:
        """Run the layer: [s, b, h] -> [s, b, h], and None in place of a cross-attention context.

        Arguments of attention layers, which a hybrid stack passes to all layers, are ignored.  With
        ``defers_sum`` the caller takes a `PendingSum` too.
        """
        cache = deprecate_inference_params(inference_context, inference_params)
        mix = partial(self.mixer, inference_context=cache, packed_seq_params=packed_seq_params)
        output = self.add_part(mix, hidden_states, (self.norm, None), self.mamba_bda)
        return output if defers_sum else summed(output), None
