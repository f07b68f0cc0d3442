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

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.rope import RotaryTable, apply_rotary, split_and_rotate
from megatron.core.packed_seq_params import AttentionMask, PackedSeqParams, position_in_sequence
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of, set_info
from megatron.core.tensor_parallel.layers import divide_over_group
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention_masks import window_of_layer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.module import MegatronModule, WithBias, is_replaced
from megatron.core.transformer.norms import l2_norm, leaves_bias_to_sum
from megatron.core.transformer.qk_clip import clip_factors, largest_logits
from megatron.core.transformer.rope import table_of_angles
from megatron.core.transformer.spec_utils import Slot, build_module, build_norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import deprecate_inference_params


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


class Attention(MegatronModule, ABC):
    """Base class of attention: core and output projection, with heads sharded over tp.

    A class derived from `SelfAttention` may compute queries, keys and values, or everything, in its
    own `get_query_key_value_tensors` or `forward`.  Collective over tp (projections) and over cp
    (core), also in backward.
    """

    attention_type = "self"
    # Of each head since the last reset by the optimizer, with --qk-clip: [n/tp].
    largest_logits: Tensor | None = None

    @library_call(
        "config submodules layer_number attn_mask_type cp_comm_type model_comm_pgs",
        unused="pp_layer_offset",
    )
    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        attention_type: str | None = None,
    ) -> None:
        """Build the submodules.  ``layer_number`` counts from 1 over the complete model or stack.

        ``cp_comm_type`` overrides the config's, ``attention_type`` the class's.  Raises ConfigError
        if the spec's core attention lacks what a flag needs.
        """
        super().__init__(config)
        self.pg_collection = pg_collection
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type or self.attention_type
        self.hidden_size_per_attention_head: int = config.kv_channels
        self.query_projection_size = config.num_attention_heads * self.query_width
        self.kv_projection_size = config.num_query_groups * config.kv_channels
        self.num_attention_heads_per_partition = divide_over_group(
            config.num_attention_heads, self.tp_group, "--num-attention-heads"
        )
        self.num_query_groups_per_partition = divide_over_group(
            config.num_query_groups, self.tp_group, "--num-query-groups"
        )
        # Rounds keys and values before they are cached; see `core.quantization`.
        self.quantizer: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self.key_hidden_size = self.query_width
        self.val_hidden_size = self.value_width
        self.checkpoint_core_attention = "core_attn" in config.modules_to_recompute
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
                "cp_comm_type": cp_comm_type,
                "k_channels": self.key_hidden_size,
                "v_channels": self.val_hidden_size,
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
            config.num_attention_heads * self.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            skip_bias_add=leaves_bias_to_sum(config, self.tp_group, self),
            offered={
                **self.offered,
                "input_is_parallel": True,
                "is_expert": False,
                "tp_comm_buffer_name": "proj",
            },
        )
        self.build_projections(submodules)

    @property
    def query_width(self) -> int:
        """Width of the queries and keys of one head."""
        return self.config.kv_channels

    @property
    def value_width(self) -> int:
        """Width of the values of one head, without padding."""
        return self.config.kv_channels

    @property
    def softmax_scale(self) -> float | None:
        """Scale of the attention scores; None: the default of the core."""
        return None

    def build_projections(self, submodules: Any) -> None:
        """Build the linear layers that compute queries, keys and values.

        A class of a project may build its own after this constructor.
        """

    @abstractmethod
    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute query, key and value from hidden states [s, b, h]."""

    def projection(
        self,
        spec: Slot | None,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        name: str = "qkv",
        config: TransformerConfig | None = None,
    ) -> Any:
        """Build a linear layer with ``output_size`` outputs in total, sharded over tp by heads.

        ``name``: that of its buffer for --tp-comm-overlap.  ``config`` replaces the layer's.
        """
        return build_module(
            spec,
            input_size,
            output_size,
            config=config or self.config,
            init_method=self.config.init_method,
            bias=bias,
            offered={
                **self.offered,
                "gather_output": False,
                "skip_bias_add": False,
                "is_expert": False,
                "tp_comm_buffer_name": name,
            },
        )

    def project_back(self, context: Tensor, gate: Any = None) -> WithBias:
        """Apply the output projection: [s, b, n d / tp] -> [s, b, h] and the bias still to add.

        ``gate``: that of `SelfAttention.get_query_key_value_tensors`.
        """
        return self.linear_proj(context if gate is None else context * torch.sigmoid(gate))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask | None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra: Any = None,
    ) -> WithBias:
        """Run the core and the output projection; recompute the core in backward if configured.

        ``extra``: what `SelfAttentionBase.rotated` returns after the value.
        """
        if self.config.qk_clip and self.training and self.attention_type == "self":
            found = largest_logits(
                query, key, self.core_attention, self.cp_group, attention_mask, packed_seq_params
            )
            known = self.largest_logits
            self.largest_logits = found if known is None else torch.maximum(known, found)
        context = self.run_core(
            (query, key, value), attention_mask, attention_bias, packed_seq_params, extra
        )
        return self.project_back(context, extra)

    def run_core(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        attention_mask: AttentionMask | None,
        attention_bias: Tensor | None,
        packed_seq_params: PackedSeqParams | None,
        extra: Any,
    ) -> Tensor:
        """Attend: [q, b, n/tp, d], 2 x [k, b, g/tp, d] -> [q, b, n d / tp]; see `attend`."""
        del extra
        is_kept = not (self.checkpoint_core_attention and self.training)
        core = self.core_attention if is_kept else self._checkpointed_attention_forward
        return core(
            *qkv,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
        )

    def _checkpointed_attention_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask | None,
        rotary_pos_emb: object = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Run the core and recompute it in backward.  ``rotary_pos_emb`` is not read."""
        del rotary_pos_emb

        def core(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
            return self.core_attention(
                q,
                k,
                v,
                attention_mask,
                attn_mask_type=attn_mask_type or self.attn_mask_type,
                attention_bias=bias,
                packed_seq_params=packed_seq_params,
            )

        context: Tensor = checkpoint(core, False, query, key, value, attention_bias)
        return context

    def _adjust_key_value_for_inference(
        self,
        inference_context: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary_pos_emb: Any,
        *args: object,
        **kwargs: object,
    ) -> tuple[Any, ...]:
        """Return what a forward pass of a project's class needs in training (Megatron Core's call).

        Query, key, value, rotary embedding, kind of mask and None.  Raises ConfigError for
        generation, where `forward` of this class uses the cache.
        """
        if inference_context is not None:
            raise ConfigError(
                f"{type(self).__name__} computes attention in its own forward(), which generation "
                "does not support: override get_query_key_value_tensors() only"
            )
        return query, key, value, rotary_pos_emb, self.attn_mask_type, None


class SelfAttentionBase(Attention):
    """Base class of self attention."""

    @abstractmethod
    def rotated(
        self, hidden_states: Tensor, rotary: RotaryTable | None, packed: PackedSeqParams | None
    ) -> tuple[Any, ...]:
        """Compute query, key and value for the core by `get_query_key_value_tensors`, rotated.

        With --attention-output-gate the gate follows them, in sparse attention `IndexVectors`.
        """

    def qk_clip_rows(self, largest: Tensor) -> list[tuple[Any, Tensor]]:
        """Return the layers that compute queries and keys, and a factor for each of their rows.

        ``largest`` [n/tp]: the largest logit of each head, for --qk-clip.
        """
        raise ConfigError(f"--qk-clip: {type(self).__name__} has no qk_clip_rows(); define it")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        key_value_states: Tensor | None = None,
        inference_context: KVCache | None = None,
        rotary_pos_emb: Any = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        attention_bias: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: object = None,
        *,
        inference_params: KVCache | None = None,
    ) -> WithBias:
        """Attend: [s, b, h] -> [s, b, h], and the output bias still to add (None if there is none).

        ``attention_mask`` is True where a key is hidden, or the bounds of documents.
        ``inference_context``: the KV cache that the new keys and values are appended to; the mask
        is then a tensor and ``attention_bias`` a `PositionBias`.  ``rotary_pos_emb``: a table, or
        Megatron Core's angles of each channel [s, 1 or b, 1, r], of packed sequences those of each
        position, or a pair of them.  ``key_value_states``, ``rotary_pos_cos``, ``rotary_pos_sin``
        and ``sequence_len_offset`` are not read.
        """
        del key_value_states, rotary_pos_cos, rotary_pos_sin, sequence_len_offset
        cache = deprecate_inference_params(inference_context, inference_params)
        if not (rotary_pos_emb is None or isinstance(rotary_pos_emb, RotaryTable)):
            rotary_pos_emb = self._table_of(rotary_pos_emb, hidden_states, packed_seq_params)
        query, key, value, *rest = self.rotated(hidden_states, rotary_pos_emb, packed_seq_params)
        extra = rest[0] if rest else None
        if self.quantizer is not None:
            key, value = self.quantizer(key, value)
        if cache is not None:
            masks = attention_mask, attention_bias
            context = self.attend_cached(cache, (query, key, value), *masks, extra)
            return self.project_back(context, extra)
        more = attention_bias, packed_seq_params
        return self.attend(query, key, value, attention_mask, *more, extra)

    def attend_cached(
        self,
        cache: KVCache,
        qkv: tuple[Tensor, Tensor, Tensor],
        attention_mask: Any,
        attention_bias: Any,
        extra: Any = None,
    ) -> Tensor:
        """Append keys and values to the cache and attend; see `KVCache.attend`."""
        del extra
        where = self.layer_number - 1
        core = self.core_attention
        return cache.attend(where, *qkv, core, mask=attention_mask, bias=attention_bias)

    def _table_of(
        self, angles: Any, hidden_states: Tensor, packed: PackedSeqParams | None
    ) -> RotaryTable:
        """Return the table of Megatron Core's angles, those of queries if there is a pair.

        With packed sequences they are those of positions, or of this rank's tokens, as ms-swift
        gives them: then there are as many as tokens and not as many as positions.
        """
        config = self.config
        angles = angles[0] if isinstance(angles, tuple) else angles
        if packed is not None:
            num_tokens = len(hidden_states) * (
                self.tp_group.size() if config.sequence_parallel else 1
            )
            are_of_tokens = len(angles) == num_tokens != max(packed.lengths)
            if not are_of_tokens:
                angles = angles[self.places_of_tokens(num_tokens, packed)[0]]
        return table_of_angles(angles, config.rotary_interleaved, config.params_dtype)

    def places_of_tokens(
        self, num_tokens: int, packed: PackedSeqParams | None
    ) -> tuple[Tensor, int]:
        """Return the position of each of this rank's tokens, and the number of all ranks' tokens.

        The position is that in the token's sequence.
        """
        cp = self.cp_group
        total = num_tokens * cp.size()
        lengths = row_lengths(None if packed is None else packed.lengths, total)
        held = held_tokens(lengths, cp.rank(), cp.size(), device.current())
        return held if packed is None else position_in_sequence(packed.ends, total)[held], total


class CrossAttention(Attention):
    """Cross attention: queries of one sequence, keys and values of another; heads sharded over tp.

    Rows of the KV projection are interleaved by query group: its key, its value, the next group.
    """

    attention_type = "cross"

    def build_projections(self, submodules: CrossAttentionSubmodules) -> None:
        """Build the Q and KV projections.  Raises ConfigError with context parallelism."""
        config, num_ranks = self.config, self.cp_group.size()
        if num_ranks > 1:
            raise ConfigError(
                f"--context-parallel-size {num_ranks}: attention to another sequence needs all of "
                "it; use --context-parallel-size 1"
            )
        hidden, bias = config.hidden_size, config.add_bias_linear
        self.linear_q = self.projection(
            submodules.linear_q, hidden, self.query_projection_size, bias=bias
        )
        self.linear_kv = self.projection(
            submodules.linear_kv, hidden, 2 * self.kv_projection_size, bias=bias
        )
        width = self.hidden_size_per_attention_head
        _note_rows(self.linear_kv, width, width)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context: KVCache | None = None,
        **unused: object,
    ) -> WithBias:
        """Attend: [q, b, h] and the other sequence [k, b, h] -> [q, b, h] and the unadded bias.

        ``attention_mask``, broadcast to [b, 1, q, k], is True where a key is hidden.
        """
        assert key_value_states is not None, "cross attention attends to another sequence"
        if inference_context is not None:
            context = inference_context.attend_to_other(
                self.layer_number - 1,
                self._queries(hidden_states),
                partial(self.keys_values, key_value_states),
                self.core_attention,
                mask=attention_mask,
            )
            return self.project_back(context)
        qkv = self.get_query_key_value_tensors(hidden_states, key_value_states)
        return self.attend(*qkv, attention_mask)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the query [q, b, n/tp, d], and key and value [k, b, g/tp, d] of the other."""
        return self._queries(hidden_states), *self.keys_values(key_value_states)

    def _queries(self, hidden_states: Tensor) -> Tensor:
        query, _ = self.linear_q(hidden_states)
        return query.view(*query.shape[:2], -1, self.hidden_size_per_attention_head)  # type: ignore[no-any-return]

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys and values of the other sequence: [k, b, h] -> 2 x [k, b, g/tp, d]."""
        mixed, _ = self.linear_kv(states)
        groups = self.num_query_groups_per_partition
        key, value = mixed.view(*mixed.shape[:2], groups, -1).chunk(2, -1)
        return key, value


class SelfAttention(SelfAttentionBase):
    """Self attention with heads sharded over the tensor-parallel group."""

    input_parts = 1  # hidden states that are joined in its input

    def build_projections(self, submodules: SelfAttentionSubmodules) -> None:
        """Build the QKV projection and the norms of queries and keys."""
        config = self.config
        width = self.hidden_size_per_attention_head
        self.has_rope = layer_has_rope(config, self.layer_number - 1)
        self.is_windowed = window_of_layer(config, self.layer_number - 1) is not None
        self.linear_qkv = self.projection(
            submodules.linear_qkv,
            self.input_parts * config.hidden_size,
            self.query_projection_size * (1 + config.attention_output_gate)
            + 2 * self.kv_projection_size,
            bias=config.add_bias_linear or config.add_qkv_bias,
        )
        heads_per_group = config.num_attention_heads // config.num_query_groups
        queries = heads_per_group * width * (1 + config.attention_output_gate)
        _note_rows(self.linear_qkv, queries, width, width)
        self.q_layernorm = self._build_norm(submodules.q_layernorm, self.query_projection_size)
        self.k_layernorm = self._build_norm(submodules.k_layernorm, self.kv_projection_size)

    def qk_clip_rows(self, largest: Tensor) -> list[tuple[Any, Tensor]]:
        """See `SelfAttentionBase.qk_clip_rows`."""
        c = self.config
        of_groups = largest.view(self.num_query_groups_per_partition, -1).amax(1, keepdim=True)
        factor = clip_factors(of_groups, c.qk_clip_threshold)
        width = self.hidden_size_per_attention_head
        queries = c.num_attention_heads // c.num_query_groups * width
        rows = [
            (factor**c.qk_clip_alpha).expand(-1, queries),
            torch.ones_like(factor).expand(-1, queries * c.attention_output_gate),
            (factor ** (1 - c.qk_clip_alpha)).expand(-1, width),
            torch.ones_like(factor).expand(-1, width),
        ]
        return [(self.linear_qkv, torch.cat(rows, 1).flatten())]

    def _build_norm(self, spec: Slot | None, width: int) -> Callable[[Tensor], Tensor] | None:
        is_full = self.config.qk_layernorm_full_width
        if spec is None or spec is IdentityOp:
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
            width if is_full else self.hidden_size_per_attention_head,
            offered={**self.offered, "has_partial_gradient": is_sharded},
        )
        return norm

    def rotated(
        self, hidden_states: Tensor, rotary: RotaryTable | None, packed: PackedSeqParams | None
    ) -> tuple[Tensor, ...]:
        """Compute query, key and value, rotated by ``rotary`` if this layer has positions."""
        table = rotary
        if rotary is not None and self.is_windowed and rotary.windowed:
            rotary = rotary.windowed
        rotary = rotary if self.has_rope else None
        if not is_replaced(self, "get_query_key_value_tensors"):
            query, *rest = self.get_query_key_value_tensors(hidden_states, rotary=rotary)
        else:
            query, key, *rest = self.get_query_key_value_tensors(hidden_states, None)
            if rotary is not None:
                fused = self.config.apply_rope_fusion
                query, key = (apply_rotary(x, rotary, fused=fused) for x in (query, key))
            rest = [key, *rest]
        return query if table is None else table.scaled(query), *rest

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        *,
        rotary: RotaryTable | None = None,
    ) -> tuple[Tensor, ...]:
        """Project: [s, b, h] -> query [s, b, n/tp, d], key and value [s, b, g/tp, d].

        With --attention-output-gate also the gate [s, b, n d / tp], of which a group has as many
        rows as of queries, and behind these.

        Query and key have their norms applied, if configured, and are rotated by ``rotary``, if it
        is given; in this order, unless --qk-layernorm-after-rope.  A project may override this
        method without ``rotary``.
        """
        mixed, bias = self.linear_qkv(hidden_states)
        assert bias is None, "the projection adds its bias itself"
        mixed = mixed.view(*mixed.shape[:2], self.num_query_groups_per_partition, -1)
        gates = []
        if self.config.attention_output_gate:
            width = self.hidden_size_per_attention_head
            query_rows = mixed.shape[-1] // 2 - width
            query, gate, rest = mixed.split([query_rows, query_rows, 2 * width], -1)
            mixed = torch.cat([query, rest], -1)
            gates = [gate.flatten(2)]
        norms = self.q_layernorm, self.k_layernorm
        is_normed_last = self.config.qk_layernorm_after_rope
        query, key, value = split_and_rotate(
            mixed,
            self.hidden_size_per_attention_head,
            rotary,
            (None, None) if is_normed_last else norms,
            fused=self.config.apply_rope_fusion,
        )
        if is_normed_last and norms[0] is not None and norms[1] is not None:
            query, key = norms[0](query), norms[1](key)
        if self.config.qk_l2_norm and self.has_rope and self.q_layernorm is None:
            query, key = l2_norm(query), l2_norm(key)
        return query, key, value, *gates


def _note_rows(layer: object, *rows: int) -> None:
    """Record in the weight's ParamInfo that rows of several matrices alternate, ``rows`` of each.

    Muon separates the matrices by it to orthogonalise each on its own.
    """
    weight = getattr(layer, "weight", None)
    if isinstance(weight, Tensor):
        set_info(weight, replace(info_of(weight), interleaved=rows))
