"""Transformer layer: norm, attention, residual, norm, MLP, residual, built from module specs.

Hidden states are [s, b, h]; with sequence parallelism they are [s/tp, b, h] between the sublayers.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.key_names import with_fused_norms
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, apply_prefix_mapping
from megatron.core.fusions.fused_bias_dropout import BiasDropoutAdd, get_bias_dropout_add
from megatron.core.fusions.rms_norm import adds_in_norm
from megatron.core.packed_seq_params import AttentionMask, PackedSeqParams
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    checkpoint,
    fork_for_tokens,
)
from megatron.core.transformer.hyper_connection import HyperConnection
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.layer_layout import layers_of_stage
from megatron.core.transformer.module import MegatronModule, WithBias, is_replaced
from megatron.core.transformer.moe.hash_router import HashRouter
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.norms import PendingSum, Stream, norm_hidden, summed
from megatron.core.transformer.spec_utils import ModuleSpec, Slot, build_module, build_norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import deprecate_inference_params

GetBiasDropoutAdd = Callable[[bool, bool], BiasDropoutAdd]  # arguments: training, fused
LayerRun = Callable[..., Tensor]  # (hidden states, keyword inputs that all layers share)


@dataclass
class TransformerLayerSubmodules:
    """Submodules of a layer.  The ``post_`` norms act on a sublayer's output before the residual.

    ``_bda`` is bias-dropout-add: it adds a sublayer's output to the residual stream.
    """

    input_layernorm: Slot = IdentityOp
    self_attention: Slot = IdentityOp
    self_attn_bda: Slot = IdentityFuncOp
    post_self_attn_layernorm: Slot = IdentityOp
    pre_cross_attn_layernorm: Slot = IdentityOp
    cross_attention: Slot = IdentityOp
    cross_attn_bda: Slot = IdentityFuncOp
    pre_mlp_layernorm: Slot = IdentityOp
    mlp: Slot = IdentityOp
    mlp_bda: Slot = IdentityFuncOp
    post_mlp_layernorm: Slot = IdentityOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)


class BaseTransformerLayer(ABC):  # noqa: B024
    """Marks classes whose spec, given to a `TransformerBlock`, describes each of its layers."""


class ResidualLayer(MegatronModule, BaseTransformerLayer):
    """Base class of layers whose sublayers, with their norms, add to the residual stream.

    A project's layer may call this constructor in place of its subclass's.
    """

    @library_call(unused="vp_stage")
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        keys_map: dict[str, str] | None = None,
    ) -> None:
        """Set common attributes.  ``layer_number`` counts from 1 over the complete model.

        ``keys_map``: see `sharded_state_dict`.
        """
        super().__init__(config)
        self.keys_map = keys_map or {}
        self.pg_collection = pg_collection
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        self.is_sequence_sharded = config.sequence_parallel and pg_collection.tp.size() > 1
        self.offered = {
            "pg_collection": pg_collection,
            "tp_group": pg_collection.tp,
            "layer_number": layer_number,
        }
        # The norm's output is the residual too with this flag, so its memory cannot be freed.
        self.recomputes_norms = (
            not config.apply_residual_connection_post_layernorm
            and "layernorm" in config.modules_to_recompute
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of `ShardedModule`, norms with the names that fused norms have.

        The submodules' ``sharded_state_dict_keys_map`` renames further prefixes.
        """
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        renamed = {prefix + old: prefix + new for old, new in self.keys_map.items()}
        apply_prefix_mapping(entries, renamed)
        kind = {
            "is_latent": self.config.multi_latent_attention,
            "has_experts": isinstance(getattr(self, "mlp", None), MoELayer),
            "is_linear": hasattr(getattr(self, "self_attention", None), "in_proj"),
        }
        for entry in entries.values():
            entry.key = with_fused_norms(entry.key, **kind)
        return entries

    def capture_parts(self, *, whole: bool) -> tuple[LayerRun | None, LayerRun | None]:
        """Return (captured, eager): the part of the layer for a CUDA graph, and the rest after it.

        ``whole``: capture as much as possible, otherwise attention alone.  Empty parts are None.
        """

        def run(hidden_states: Tensor, **shared: object) -> Tensor:
            output: Tensor = self(hidden_states, **shared)[0]
            return output

        return (run, None) if whole else (None, run)

    def build_norm(self, spec: Slot) -> nn.Module:
        """Build a norm of hidden states from its spec."""
        norm: nn.Module = build_norm(spec, self.config, self.config.hidden_size)
        return norm

    def add_part(
        self,
        part: Callable[[Tensor], WithBias],
        stream: Stream,
        norms: tuple[nn.Module, nn.Module | None],
        bda: GetBiasDropoutAdd,
        connection: HyperConnection | None = None,
    ) -> Stream:
        """Add the output of sublayer ``part`` to the residual stream: [s, b, h] -> [s, b, h].

        ``norms``: the norms of the sublayer's input and (or None) of its output.  On a GPU the
        addition waits for the norm of the next sublayer (`PendingSum`).  With ``connection``
        there are several streams: [s, b, n h] -> [s, b, n h].
        """
        write: Callable[[Tensor], Stream] | None = None
        if connection is not None:
            assert not isinstance(stream, PendingSum), "streams are added at once"
            stream, write = connection.read(stream)
        memory: CheckpointWithoutOutput | None = None
        if self.recomputes_norms and self.training and not isinstance(norms[0], IdentityOp):
            memory = CheckpointWithoutOutput()
            stream = summed(stream)
            normed = memory.checkpoint(norms[0], stream)
        else:
            stream, normed = norm_hidden(norms[0], stream)
        added = part(normed)
        if memory is not None:  # the last user of the norm's output has run
            memory.discard_output_and_register_recompute(added[0])
        residual = normed if self.config.apply_residual_connection_post_layernorm else stream
        if self.config.fp32_residual_connection:
            residual = residual.float()
        if norms[1] is not None and not isinstance(norms[1], IdentityOp):
            x, bias = added
            added = norms[1](x if bias is None else x + bias), None
        if (scale := self.config.residual_scale) is not None:
            x, bias = added
            added = x * scale, None if bias is None else bias * scale
        prob = self.hidden_dropout if self.training else 0.0
        if write is not None:
            x, bias = added
            with fork_for_tokens(prob > 0, is_sequence_sharded=self.is_sequence_sharded):
                return write(F.dropout(x if bias is None else x + bias, prob))
        is_ours = bda is get_bias_dropout_add and self.config.bias_dropout_fusion
        if is_ours and adds_in_norm(*added, residual):
            return PendingSum(*added, residual, prob, self.is_sequence_sharded)
        with fork_for_tokens(prob > 0, is_sequence_sharded=self.is_sequence_sharded):
            add = bda(self.training, self.config.bias_dropout_fusion)
            return add(added, residual, self.hidden_dropout)


class TransformerLayer(ResidualLayer):
    """Layer of self attention, optional cross attention, and MLP or MoE."""

    # For classes of projects that add to the residual stream themselves.
    bias_dropout_add_exec_handler = torch.enable_grad

    @library_call("config submodules layer_number hidden_dropout model_comm_pgs vp_stage")
    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
        pp_layer_offset: int | None = None,
    ) -> None:
        """Build the submodules.  ``layer_number`` counts from 1 over the layers of the stage.

        ``pp_layer_offset``: number of layers before the stage, by default that of ``vp_stage``.
        The attribute ``layer_number`` counts over the complete model.
        """
        if pp_layer_offset is None:
            pp_layer_offset = layers_of_stage(config, pg_collection.pp, vp_stage).start
        super().__init__(
            config,
            layer_number + pp_layer_offset,
            hidden_dropout,
            pg_collection=pg_collection,
            keys_map=submodules.sharded_state_dict_keys_map,
        )
        _check_norms(config, submodules)
        self.submodules_config = submodules
        norm = self.build_norm
        more: dict[str, Any] = {"config": config, "offered": self.offered}
        self.input_layernorm = norm(submodules.input_layernorm)
        self.self_attention = build_module(submodules.self_attention, **more)
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        # Slots that a project's own submodules may lack.
        after = getattr(submodules, "post_self_attn_layernorm", IdentityOp)
        self.post_self_attn_layernorm = norm(after)
        self.pre_cross_attn_layernorm = norm(submodules.pre_cross_attn_layernorm)
        self.cross_attention = build_module(submodules.cross_attention, **more)
        self.cross_attn_bda = build_module(submodules.cross_attn_bda)
        self.pre_mlp_layernorm = norm(submodules.pre_mlp_layernorm)
        self.mlp = build_module(submodules.mlp, **more)
        self.mlp_bda = build_module(submodules.mlp_bda)
        self.post_mlp_layernorm = norm(getattr(submodules, "post_mlp_layernorm", IdentityOp))
        whole_mlp = "moe" if isinstance(self.mlp, MoELayer) else "mlp"
        self.recompute_mlp = whole_mlp in config.modules_to_recompute
        self.self_attention_hyper_connection: HyperConnection | None = None
        self.mlp_hyper_connection: HyperConnection | None = None
        if config.enable_mhc_connections:
            self.self_attention_hyper_connection = HyperConnection(config)
            self.mlp_hyper_connection = HyperConnection(config)
        self.recompute_input_layernorm, self.recompute_pre_mlp_layernorm = (
            self.recomputes_norms and not isinstance(each, IdentityOp)
            for each in (self.input_layernorm, self.pre_mlp_layernorm)
        )

    @property
    def has_cross_attention(self) -> bool:
        """Whether the layer has more than self attention before its MLP."""
        return not isinstance(self.cross_attention, IdentityOp)

    def forward(
        self,
        hidden_states: Stream,
        attention_mask: AttentionMask | None = None,
        context: Tensor | None = None,
        *args: Any,
        defers_sum: bool = False,
        padding_mask: Tensor | None = None,
        expert_routes: Tensor | None = None,
        token_ids: Tensor | None = None,
        **more: Any,
    ) -> tuple[Stream, Tensor | None]:
        """Run the layer: [s, b, h] -> [s, b, h], and ``context`` unchanged.

        ``context`` [k, b, h]: the sequence that cross attention attends to.  ``padding_mask``
        [b, s]: True for this rank's tokens that no expert computes.  ``expert_routes``
        [b, s, layers of the model, k]: experts to replay, see `RouterReplay`.  ``token_ids``: see
        `HashRouter`.  ``more``: further arguments of `add_attention`.  With ``defers_sum`` the
        caller takes a `PendingSum` too.
        """
        if self._has_own_parts():
            attend: Callable[..., tuple[Any, ...]] = self._forward_attention
            # In classes for Megatron Core v0.12 the first part ends with the norm of the second.
            states, *residual, context = attend(
                summed(hidden_states), attention_mask, context, *args, **more
            )
            others: list[Any] = residual or [more.get("inference_context")]
            masks: dict[str, Any] = {} if padding_mask is None else {"padding_mask": padding_mask}
            return self._forward_mlp(states, *others, **masks), context
        attended = self.add_attention(hidden_states, attention_mask, context, *args, **more)
        packed = more.get("packed_seq_params")
        output = self.add_mlp(attended, padding_mask, packed, expert_routes, token_ids)
        return output if defers_sum else summed(output), context

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask | None = None,
        context: Tensor | None = None,
        *args: Any,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the part of `forward` before the MLP, for projects that call or replace it."""
        attended = self.add_attention(hidden_states, attention_mask, context, *args, **more)
        return summed(attended), context

    def _forward_mlp(
        self,
        hidden_states: Tensor,
        inference_context: KVCache | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the part of `forward` after `_forward_attention`, for projects like that one."""
        del inference_context
        return summed(self.add_mlp(hidden_states, padding_mask))

    def _has_own_parts(self) -> bool:
        return is_replaced(self, "_forward_attention") or is_replaced(self, "_forward_mlp")

    def add_attention(
        self,
        hidden_states: Stream,
        attention_mask: AttentionMask | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        attention_bias: Any = None,
        inference_context: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: object = None,
        *,
        inference_params: KVCache | None = None,
        rotary_pos_cos_sin: object = None,
        **more: object,
    ) -> Stream:
        """Run self attention and cross attention, the first sublayers of `forward`.

        ``more``: further arguments of self attention (`SelfAttentionBase.forward`).
        The ``rotary_pos_`` cosines and sines, and ``sequence_len_offset``, are not read.
        """
        inference_context = deprecate_inference_params(inference_context, inference_params)
        attend = partial(
            self.self_attention,
            attention_mask=attention_mask,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
            **more,
        )
        norms = self.input_layernorm, getattr(self, "post_self_attn_layernorm", None)
        # A project's layer may have been built without our constructor.
        connection = getattr(self, "self_attention_hyper_connection", None)
        hidden_states = self.add_part(attend, hidden_states, norms, self.self_attn_bda, connection)
        if self.has_cross_attention:
            hidden_states = self.add_cross_attention(
                hidden_states, context, context_mask, inference_context
            )
        return hidden_states

    def add_cross_attention(
        self,
        hidden_states: Stream,
        context: Tensor | None,
        context_mask: Tensor | None,
        inference_context: KVCache | None,
    ) -> Stream:
        """Run cross attention, the last part of `add_attention`."""
        attend = partial(
            self.cross_attention,
            attention_mask=context_mask,
            key_value_states=context,
            inference_context=inference_context,
        )
        norms = self.pre_cross_attn_layernorm, None
        return self.add_part(attend, hidden_states, norms, self.cross_attn_bda)

    def add_mlp(
        self,
        hidden_states: Stream,
        padding_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        expert_routes: Tensor | None = None,
        token_ids: Tensor | None = None,
    ) -> Stream:
        """Run the MLP or MoE, the last sublayer of `forward`."""
        norms = self.pre_mlp_layernorm, getattr(self, "post_mlp_layernorm", None)
        mlp: Callable[..., Any] = self.mlp
        if isinstance(mlp, MoELayer) and packed_seq_params is not None and mlp.depends_on_order:
            mlp = partial(mlp, packed_seq_params=packed_seq_params)
        if isinstance(self.mlp, MoELayer) and expert_routes is not None:
            mlp = partial(mlp, expert_routes=expert_routes[:, :, self.layer_number - 1])
        if isinstance(self.mlp, MoELayer) and isinstance(self.mlp.router, HashRouter):
            mlp = partial(mlp, token_ids=token_ids)
        run = partial(checkpoint, mlp, False) if self.recompute_mlp and self.training else mlp
        has_mask = padding_mask is not None and isinstance(self.mlp, MoELayer)
        masks = (padding_mask,) if has_mask else ()
        more = self.mlp_bda, getattr(self, "mlp_hyper_connection", None)
        return self.add_part(lambda x: run(x, *masks), hidden_states, norms, *more)

    def capture_parts(self, *, whole: bool) -> tuple[LayerRun | None, LayerRun | None]:
        """See `ResidualLayer`.  MoE is not captured: the host must read token counts."""
        if whole and not isinstance(self.mlp, MoELayer):
            return super().capture_parts(whole=True)
        has_attention = not isinstance(self.self_attention, IdentityOp) or self.has_cross_attention
        if self._has_own_parts() or not has_attention:
            return super().capture_parts(whole=False)

        def attend(x: Tensor, **shared: Any) -> Tensor:
            of_mlp = "padding_mask", "expert_routes", "token_ids"
            return summed(
                self.add_attention(x, **{k: v for k, v in shared.items() if k not in of_mlp})
            )

        def compute(
            x: Tensor,
            *,
            padding_mask: Tensor | None = None,
            expert_routes: Tensor | None = None,
            token_ids: Tensor | None = None,
            **_: object,
        ) -> Tensor:
            return summed(self.add_mlp(x, padding_mask, None, expert_routes, token_ids))

        return attend, compute


def _check_norms(config: TransformerConfig, submodules: TransformerLayerSubmodules) -> None:
    """Raise ConfigError if the norms of the spec contradict --layer-norm-placement."""
    placement = config.layer_norm_placement
    if placement in ("pre", "post_softmax") or not isinstance(
        submodules.self_attention, ModuleSpec
    ):
        return
    has_before = submodules.input_layernorm is not IdentityOp
    has_after = getattr(submodules, "post_self_attn_layernorm", IdentityOp) is not IdentityOp
    if not has_after or has_before == (placement == "post"):
        raise ConfigError(
            f"--layer-norm-placement {placement}: the spec of the layer places its norms "
            "differently; make it by get_gpt_layer_local_spec(config=config)"
        )
