"""Attention sublayer: QKV projection, norms of queries and keys, rotary embedding, KV cache.

The attention core itself is in dot_product_attention.py.

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``n`` query heads, ``g`` key/value heads (query
groups), ``d`` head dimension; ``x/tp`` is the share of one tensor-parallel rank.  Rows of the QKV
projection are interleaved by query group: the n/g query heads of a group, its key, its value, then
the next group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.rope import RotaryTable, split_and_rotate
from megatron.core.packed_seq_params import AttentionMask, PackedSeqParams
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of, set_info
from megatron.core.tensor_parallel.layers import divide_over_group
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention_masks import window_of_layer
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.module import MegatronModule, WithBias
from megatron.core.transformer.norms import l2_norm, leaves_bias_to_sum
from megatron.core.transformer.spec_utils import Slot, build_module, build_norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import (
    deprecate_inference_params as deprecate_inference_params,
)  # for scripts


@dataclass
class CrossAttentionSubmodules:
    """Submodules of cross attention."""

    linear_q: Slot | None = None
    linear_kv: Slot | None = None
    core_attention: Slot | None = None
    linear_proj: Slot | None = None


@dataclass
class SelfAttentionSubmodules:
    """Submodules of self attention."""

    linear_qkv: Slot | None = None
    core_attention: Slot | None = None
    linear_proj: Slot | None = None
    q_layernorm: Slot | None = None
    k_layernorm: Slot | None = None


def layer_has_rope(config: TransformerConfig, layer_index: int) -> bool:
    """Return whether layer ``layer_index`` (from 0) applies the rotary embedding."""
    skip = config.no_rope_freq
    if isinstance(skip, tuple | list):
        return not skip[layer_index]
    return not skip or (layer_index + 1) % skip != 0


class AttentionBase(MegatronModule, ABC):
    """Base class of attention: core and output projection, with heads sharded over tp.

    Collective over tp (projections) and over cp (core), also in backward.
    """

    attention_type = "self"
    default_mask = AttnMaskType.causal

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Build the submodules.  ``layer_number`` counts from 1 over the complete model or stack.

        Raises ConfigError if the spec's core attention lacks what a flag needs.
        """
        super().__init__(config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type or self.default_mask
        self.recomputes_core = "core_attn" in config.modules_to_recompute
        self.offered = {"tp_group": self.tp_group, "pg_collection": pg_collection}
        self.core_attention: Callable[..., Tensor] = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=self.attn_mask_type,
            offered={
                **self.offered,
                "attention_type": self.attention_type,
                "softmax_scale": self.softmax_scale,
            },
        )
        lack = None
        if self.cp_group.size() > 1 and not hasattr(self.core_attention, "cp_comm"):
            lack = "--context-parallel-size", "does not support context parallelism"
        elif config.softmax_type != "vanilla" and not hasattr(
            self.core_attention, "softmax_offset"
        ):
            lack = "--softmax-type", "has no attention sink"
        if lack is not None:
            raise ConfigError(
                f"{lack[0]}: the spec's core attention {type(self.core_attention).__name__} "
                f"{lack[1]}; use DotProductAttention or a class derived from it"
            )
        self.linear_proj: Callable[[Tensor], WithBias] = build_module(
            submodules.linear_proj,
            self.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            skip_bias_add=leaves_bias_to_sum(config, self.tp_group),
            offered=self.offered,
        )
        self.build_projections(submodules)

    @property
    def value_width(self) -> int:
        """Total width of the values of all heads, on all ranks."""
        return self.config.num_attention_heads * self.config.kv_channels

    @property
    def softmax_scale(self) -> float | None:
        """Scale of the attention scores; None: the default of the core."""
        return None

    @abstractmethod
    def build_projections(self, submodules: Any) -> None:
        """Build the linear layers that compute queries, keys and values."""

    def projection(
        self, spec: Slot | None, input_size: int, output_size: int, *, bias: bool
    ) -> Any:
        """Build a linear layer with ``output_size`` outputs in total, sharded over tp by heads."""
        return build_module(
            spec,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            offered=self.offered,
        )

    def project_back(self, context: Tensor) -> WithBias:
        """Apply the output projection: [s, b, n d / tp] -> [s, b, h] and the bias still to add."""
        return self.linear_proj(context)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask | None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> WithBias:
        """Run the core and the output projection; recompute the core in backward if configured."""

        def core(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
            return self.core_attention(
                q,
                k,
                v,
                attention_mask,
                attn_mask_type=self.attn_mask_type,
                attention_bias=bias,
                packed_seq_params=packed_seq_params,
            )

        inputs = query, key, value, attention_bias
        recomputes = self.recomputes_core and self.training
        return self.project_back(checkpoint(core, False, *inputs) if recomputes else core(*inputs))


class SelfAttentionBase(AttentionBase):
    """Base class of self attention."""

    @abstractmethod
    def queries_keys_values(
        self, hidden_states: Tensor, rotary: RotaryTable | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query, key and value for the core from hidden states [s, b, h]."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        inference_context: KVCache | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        attention_bias: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> WithBias:
        """Attend: [s, b, h] -> [s, b, h], and the output bias still to add (None if there is none).

        ``attention_mask`` is True where a key is hidden, or the bounds of documents.
        ``inference_context``: the KV cache that the new keys and values are appended to; the mask
        is then a tensor and ``attention_bias`` a `PositionBias`.
        """
        query, key, value = self.queries_keys_values(hidden_states, rotary_pos_emb)
        if inference_context is not None:
            context = inference_context.attend(
                self.layer_number - 1,
                query,
                key,
                value,
                self.core_attention,
                mask=attention_mask,
                bias=attention_bias,
            )
            return self.project_back(context)
        return self.attend(query, key, value, attention_mask, attention_bias, packed_seq_params)


class CrossAttention(AttentionBase):
    """Cross attention: queries of one sequence, keys and values of another; heads sharded over tp.

    Rows of the KV projection are interleaved by query group: its key, its value, the next group.
    """

    attention_type = "cross"
    default_mask = AttnMaskType.padding

    def build_projections(self, submodules: CrossAttentionSubmodules) -> None:
        """Build the Q and KV projections.  Raises ConfigError with context parallelism."""
        config, num_ranks = self.config, self.cp_group.size()
        if num_ranks > 1:
            raise ConfigError(
                f"--context-parallel-size {num_ranks}: attention to another sequence needs all of "
                "it; use --context-parallel-size 1"
            )
        width = self.head_dim = config.kv_channels
        groups = config.num_query_groups
        self.local_groups = divide_over_group(groups, self.tp_group, "--num-query-groups")
        hidden, bias = config.hidden_size, config.add_bias_linear
        self.linear_q = self.projection(submodules.linear_q, hidden, self.value_width, bias=bias)
        self.linear_kv = self.projection(
            submodules.linear_kv, hidden, 2 * groups * width, bias=bias
        )
        _note_rows(self.linear_kv, width, width)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        key_value_states: Tensor,
        inference_context: KVCache | None = None,
    ) -> WithBias:
        """Attend: [q, b, h] and the other sequence [k, b, h] -> [q, b, h] and the unadded bias.

        ``attention_mask``, broadcast to [b, 1, q, k], is True where a key is hidden.
        """
        query, _ = self.linear_q(hidden_states)
        query = query.view(*query.shape[:2], -1, self.head_dim)
        if inference_context is not None:
            context = inference_context.attend_to_other(
                self.layer_number - 1,
                query,
                partial(self.keys_values, key_value_states),
                self.core_attention,
                mask=attention_mask,
            )
            return self.project_back(context)
        key, value = self.keys_values(key_value_states)
        return self.attend(query, key, value, attention_mask)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values of the other sequence: [k, b, h] -> 2 x [k, b, g/tp, d]."""
        mixed, _ = self.linear_kv(states)
        key, value = mixed.view(*mixed.shape[:2], self.local_groups, -1).chunk(2, -1)
        return key, value


class SelfAttention(SelfAttentionBase):
    """Self attention with heads sharded over the tensor-parallel group."""

    def build_projections(self, submodules: SelfAttentionSubmodules) -> None:
        """Build the QKV projection and the norms of queries and keys."""
        config = self.config
        self.head_dim: int = config.kv_channels
        query_width, key_width = self.value_width, config.num_query_groups * self.head_dim
        self.local_groups = divide_over_group(
            config.num_query_groups, self.tp_group, "--num-query-groups"
        )
        self.heads_per_group = config.num_attention_heads // config.num_query_groups
        self.has_rope = layer_has_rope(config, self.layer_number - 1)
        self.is_windowed = window_of_layer(config, self.layer_number - 1) is not None
        self.linear_qkv = self.projection(
            submodules.linear_qkv,
            config.hidden_size,
            query_width + 2 * key_width,
            bias=config.add_bias_linear or config.add_qkv_bias,
        )
        _note_rows(self.linear_qkv, self.heads_per_group * self.head_dim, *[self.head_dim] * 2)
        self.q_layernorm = self._build_norm(submodules.q_layernorm, query_width)
        self.k_layernorm = self._build_norm(submodules.k_layernorm, key_width)

    def _build_norm(self, spec: Slot | None, width: int) -> Callable[[Tensor], Tensor] | None:
        is_full = self.config.qk_layernorm_full_width
        if spec is None:
            if is_full:
                raise ConfigError(
                    "--qk-layernorm-full-width: the spec of the layer has no such norm; make it by "
                    "get_gpt_layer_local_spec(config=config)"
                )
            return None
        # Each rank normalizes its own heads only, so its weight gradient is a partial sum.
        is_sharded = self.tp_group.size() > 1
        norm: Callable[[Tensor], Tensor] = build_norm(
            spec,
            self.config,
            width if is_full else self.head_dim,
            offered={**self.offered, "has_partial_gradient": is_sharded},
        )
        return norm

    def queries_keys_values(
        self, hidden_states: Tensor, rotary: RotaryTable | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project: [s, b, h] -> query [s, b, n/tp, d], key and value [s, b, g/tp, d].

        Query and key have their norms and the rotary embedding applied, if configured.
        """
        mixed, bias = self.linear_qkv(hidden_states)
        assert bias is None, "the projection adds its bias itself"
        mixed = mixed.view(*mixed.shape[:2], self.local_groups, -1)
        rotary = rotary if self.has_rope else None
        if rotary is not None and self.is_windowed:
            rotary = rotary.windowed or rotary
        query, key, value = split_and_rotate(
            mixed,
            self.head_dim,
            rotary,
            (self.q_layernorm, self.k_layernorm),
            fused=self.config.apply_rope_fusion,
        )
        if self.config.qk_l2_norm and self.has_rope:
            query, key = l2_norm(query), l2_norm(key)
        return query, key, value


def _note_rows(layer: object, *rows: int) -> None:
    """Record in the weight's ParamInfo that rows of several matrices alternate, ``rows`` of each.

    Muon separates the matrices by it to orthogonalise each on its own.
    """
    weight = getattr(layer, "weight", None)
    if isinstance(weight, Tensor):
        set_info(weight, replace(info_of(weight), interleaved=rows))
