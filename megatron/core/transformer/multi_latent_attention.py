"""Multi-latent attention (MLA): queries, keys and values are up-projected from latent vectors.

Source: arXiv 2405.04434.  With --cache-mla-latents generation caches latent vectors.  Queries are
then projected to the latent space instead of latents to keys, q (W l) = (q W) l, and the weighted
sum of latents is projected to values after the core (weight absorption).

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``n`` heads, ``l`` rank of the latents; each head
has ``d`` channels without rotary embedding and ``r`` with it (all heads share these of the key).
Latent vectors are replicated over tensor-parallel ranks, heads are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention import SelfAttentionBase, layer_has_rope
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.module import WithBias, is_replaced
from megatron.core.transformer.qk_clip import clip_factors
from megatron.core.transformer.rope import RotaryEmbedding, build_rotary, yarn_mscale
from megatron.core.transformer.spec_utils import Slot, build_module, build_norm
from megatron.core.transformer.transformer_config import MLATransformerConfig


@dataclass
class MLASelfAttentionSubmodules:
    """Submodules of multi-latent attention.  The norms act on the latent vectors."""

    linear_q_proj: Slot | None = None
    linear_q_down_proj: Slot | None = None
    linear_q_up_proj: Slot | None = None
    linear_kv_down_proj: Slot | None = None
    linear_kv_up_proj: Slot | None = None
    core_attention: Slot | None = None
    linear_proj: Slot | None = None
    q_layernorm: Slot | None = None
    kv_layernorm: Slot | None = None


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head with its own matrix: [s, b, n, i], [n, o, i] -> [s, b, n, o]."""
    return torch.einsum("sbni,noi->sbno", x, weight)


class MultiLatentAttention(SelfAttentionBase):
    """Base class of multi-latent attention."""

    @property
    def query_width(self) -> int:
        """Width of the queries and keys of one head, d + r."""
        return self.config.qk_head_dim + self.config.qk_pos_emb_head_dim

    q_head_dim = query_width  # Megatron Core's name

    @property
    def value_width(self) -> int:
        """Width of the values of one head, without padding."""
        return self.config.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention scores: mscale^2 / sqrt(d + r), with YaRN's attention scaling."""
        mscale = yarn_mscale(self.config.rotary_scaling_factor, self.config.mscale)
        return mscale**2 / math.sqrt(self.query_width)

    @cached_property
    def rotary_pos_emb(self) -> RotaryEmbedding:
        """The rotary embedding of a layer to which no model passes one."""
        default = MLATransformerConfig.original_max_position_embeddings
        return build_rotary(self.config, default)

    def rotated(
        self, hidden_states: Tensor, rotary: RotaryTable | None, packed: PackedSeqParams | None
    ) -> tuple[Any, ...]:
        """See `SelfAttentionBase.rotated`; the method of a project rotates too."""
        is_own = is_replaced(self, "get_query_key_value_tensors")
        more = {} if is_own else {"rotary": rotary}
        qkv = self.get_query_key_value_tensors(hidden_states, None, None, packed, **more)
        query, key, value, *extra = qkv
        qkv = (x if x.dim() == 4 else x.unsqueeze(1) for x in (query, key, value))
        return *qkv, *extra

    def project_back(self, context: Tensor, gate: Any = None) -> WithBias:
        """Drop the padding of values, if any, and project: [s, b, n/tp (d + r)] -> [s, b, h]."""
        heads = self.num_attention_heads_per_partition
        context = context.unflatten(-1, (heads, -1))[..., : self.value_width]
        return self.linear_proj(context.flatten(-2))


class MLASelfAttention(MultiLatentAttention):
    """Multi-latent self attention."""

    # Of absorbed weights.  Generation may set another one on an instance.
    multiply_heads: Callable[[Tensor, Tensor], Tensor] = staticmethod(multiply_heads)

    def build_projections(self, submodules: MLASelfAttentionSubmodules) -> None:
        """Build the down-projections (replicated), latent norms and up-projections (sharded)."""
        c, heads = self.config, self.config.num_attention_heads
        if c.mla_latent_norm_epsilon is not None:  # also that of norms in up-projections
            c = replace(c, layernorm_epsilon=c.mla_latent_norm_epsilon)
        self.is_sequence_sharded = c.sequence_parallel and self.tp_group.size() > 1
        self.has_rope = layer_has_rope(c, self.layer_number - 1)

        def up(spec: Slot | None, input_size: int, width: int, name: str) -> Any:
            return self.projection(spec, input_size, heads * width, bias=False, name=name, config=c)

        def down(spec: Slot | None, width: int, name: str) -> Any:
            return build_module(
                spec or ReplicatedLinear,
                c.hidden_size,
                width,
                config=c,
                init_method=c.init_method,
                bias=False,
                offered={
                    **self.offered,
                    "parallel_mode": "duplicated",
                    "gather_output": False,
                    "skip_bias_add": False,
                    "is_expert": False,
                    "tp_comm_buffer_name": name,
                    "skip_weight_param_allocation": False,
                },
            )

        def norm(spec: Slot | None, width: int) -> Any:
            return build_norm(spec or IdentityOp, c, width)

        s = submodules
        if c.q_lora_rank is None:
            self.linear_q_proj = up(s.linear_q_proj, c.hidden_size, self.query_width, "q_proj")
        else:
            self.linear_q_down_proj = down(s.linear_q_down_proj, c.q_lora_rank, "q_down_proj")
            self.q_layernorm = norm(s.q_layernorm, c.q_lora_rank)
            self.linear_q_up_proj = up(
                s.linear_q_up_proj, c.q_lora_rank, self.query_width, "q_up_proj"
            )
        self.linear_kv_down_proj = down(
            s.linear_kv_down_proj, c.kv_lora_rank + c.qk_pos_emb_head_dim, "kv_down_proj"
        )
        self.kv_layernorm = norm(s.kv_layernorm, c.kv_lora_rank)
        self.linear_kv_up_proj = up(
            s.linear_kv_up_proj, c.kv_lora_rank, c.qk_head_dim + c.v_head_dim, "kv_up_proj"
        )
        self.recompute_up_proj = "mla_up_proj" in c.modules_to_recompute

    def qk_clip_rows(self, largest: Tensor) -> list[tuple[Any, Tensor]]:
        """See `SelfAttentionBase.qk_clip_rows`.

        All heads share the rotated channels of the key: those of the query take the complete
        factor.
        """
        c = self.config
        factor = clip_factors(largest, c.qk_clip_threshold).unsqueeze(1)
        query = [
            (factor**c.qk_clip_alpha).expand(-1, c.qk_head_dim),
            factor.expand(-1, c.qk_pos_emb_head_dim),
        ]
        key_value = [
            (factor ** (1 - c.qk_clip_alpha)).expand(-1, c.qk_head_dim),
            torch.ones_like(factor).expand(-1, c.v_head_dim),
        ]
        linear_q = self.linear_q_proj if c.q_lora_rank is None else self.linear_q_up_proj
        return [
            (linear_q, torch.cat(query, 1).flatten()),
            (self.linear_kv_up_proj, torch.cat(key_value, 1).flatten()),
        ]

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **more: Any
    ) -> WithBias:
        """See `SelfAttentionBase.forward`."""
        c = self.config
        cache = more.get("inference_context")
        if cache is None or not c.cache_mla_latents:
            return super().forward(hidden_states, attention_mask, *args, **more)
        rotary_pos_emb = more["rotary_pos_emb"]
        assert rotary_pos_emb is not None, "latent attention has rotary positions"
        narrow, key_position = self._narrow(hidden_states)
        up = self.linear_kv_up_proj
        narrow = up.normalized(narrow) if hasattr(up, "normalized") else narrow
        rotated = self._rotate(key_position.unsqueeze(2), rotary_pos_emb)
        latents = torch.cat([narrow.unsqueeze(2), rotated], -1)  # the keys of all heads
        narrow_query = self._narrow_query(hidden_states)
        query, position = self._query(narrow_query, rotary_pos_emb)
        heads = self.num_attention_heads_per_partition
        raising = up.effective_weight().unflatten(0, (heads, -1))
        raises_key, raises_value = raising.split([c.qk_head_dim, c.v_head_dim], 1)
        lowered = self.multiply_heads(query, raises_key.transpose(1, 2))
        context = self.attend_cached(
            cache,
            (torch.cat([lowered, position], -1), latents, latents[..., :0]),
            attention_mask,
            more.get("attention_bias"),
            *self.extra_of(hidden_states, narrow_query, rotary_pos_emb),
        )
        context = context.unflatten(-1, (heads, -1))[..., : c.kv_lora_rank]
        return self.linear_proj(self.multiply_heads(context, raises_value).flatten(2))

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: KVCache | None = None,
        *,
        inference_params: KVCache | None = None,
        rotary: RotaryTable | None = None,
    ) -> tuple[Any, ...]:
        """Project and rotate: [s, b, h] -> query and key [s, b, n/tp, d + r], and value.

        Sparse attention adds its `IndexVectors`.

        ``rotary`` is by default the table of the layer's own rotary embedding.  The core takes
        values of their own width in training.  Otherwise they are padded with zeros to the width of
        keys, which caches and some attention kernels require.  A project may override this method
        without ``rotary``.
        """
        if rotary is None:
            shards = self.tp_group.size() if self.is_sequence_sharded else 1
            places, total = self.places_of_tokens(len(hidden_states) * shards, packed_seq_params)
            rotary = self.rotary_pos_emb.table_at(places, total, self.config.params_dtype)
        narrow_query = self._narrow_query(hidden_states)
        narrow, key_position = self._narrow(hidden_states)
        # All heads share it and each rank has some of them, so gradients are summed over tp.
        if self.is_sequence_sharded:
            key_position = gather_from_sequence_parallel_region(key_position, group=self.tp_group)
        else:
            key_position = copy_to_tensor_model_parallel_region(key_position, self.tp_group)

        raised = partial(self._raised, rotary)
        extra = self.extra_of(hidden_states, narrow_query, rotary)
        if self.recompute_up_proj and self.training:
            qkv = checkpoint(raised, False, narrow_query, narrow, key_position)
            return *qkv, *extra
        return *raised(narrow_query, narrow, key_position), *extra

    def extra_of(
        self, hidden_states: Tensor, narrow_query: Tensor, rotary: RotaryTable
    ) -> tuple[Any, ...]:
        """Return the last argument of `attend_cached` and `run_core`, if a class needs one."""
        del hidden_states, narrow_query, rotary
        return ()

    def _down(self, linear: Callable[..., WithBias], hidden_states: Tensor, width: int) -> Tensor:
        """Return the latents of a down-projection: [s, b, h] -> [s, b, ``width``].

        With sequence parallelism s/tp on both sides.  A layer that shards its outputs gathers the
        sequence and computes a part of the latents: this part is gathered.
        """
        narrow, _ = linear(hidden_states)
        if narrow.shape[-1] != width:
            narrow = gather_from_tensor_model_parallel_region(narrow, self.tp_group)
            if self.is_sequence_sharded:
                narrow = scatter_to_sequence_parallel_region(narrow, self.tp_group)
        return narrow

    def _narrow_query(self, hidden_states: Tensor) -> Tensor:
        rank = self.config.q_lora_rank
        if rank is None:
            return hidden_states
        narrow: Tensor = self.q_layernorm(self._down(self.linear_q_down_proj, hidden_states, rank))
        return narrow

    def _narrow(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized latents of keys and values [.., l], and the key channels to rotate.

        The latter [.., r] are shared by all heads.  A norm in the up-projection is not applied.
        """
        widths = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        narrow = self._down(self.linear_kv_down_proj, hidden_states, sum(widths))
        narrow, key_position = narrow.split(widths, -1)
        return self.kv_layernorm(narrow), key_position

    def _query(self, narrow_query: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """Return the queries [s, b, n/tp, d] and their rotated channels [s, b, n/tp, r]."""
        c = self.config
        linear_q = self.linear_q_proj if c.q_lora_rank is None else self.linear_q_up_proj
        query = linear_q(narrow_query)[0].unflatten(-1, (-1, self.query_width))
        query = rotary.scaled(query)
        query, position = query.split([c.qk_head_dim, c.qk_pos_emb_head_dim], -1)
        return query, self._rotate(position, rotary)

    def _rotate(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Rotate the channels with positions, if this layer does."""
        return apply_rotary(x, rotary, fused=self.config.apply_rope_fusion) if self.has_rope else x

    def _raised(
        self, rotary: RotaryTable, narrow_query: Tensor, narrow: Tensor, key_position: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        query = torch.cat(self._query(narrow_query, rotary), -1)
        heads = self.num_attention_heads_per_partition
        key_value = self.linear_kv_up_proj(narrow)[0].unflatten(-1, (heads, -1))
        key, value = key_value.split([c.qk_head_dim, c.v_head_dim], -1)
        key_position = self._rotate(key_position.unsqueeze(2), rotary)
        key = torch.cat([key, key_position.expand(-1, -1, heads, -1)], -1)
        takes_narrow = getattr(self.core_attention, "takes_narrow_values", False)
        # A recomputed core keeps its inputs: a view would keep keys and values twice.
        if not self.training or self.checkpoint_core_attention or not takes_narrow:
            value = F.pad(value, (0, self.query_width - c.v_head_dim))
        return query, key, value
