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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fusions.rope import RotaryTable, apply_rotary
from megatron.core.tensor_parallel.layers import ReplicatedLinear, divide_over_group
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention import SelfAttentionBase
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.module import WithBias
from megatron.core.transformer.rope import yarn_mscale
from megatron.core.transformer.spec_utils import Slot, build_norm
from megatron.core.utils import (
    deprecate_inference_params as deprecate_inference_params,
)  # for scripts


@dataclass
class MLASelfAttentionSubmodules:
    """Submodules of multi-latent attention.  The norms act on the latent vectors."""

    linear_up: Slot | None = None
    core_attention: Slot | None = None
    linear_proj: Slot | None = None
    q_layernorm: Slot | None = None
    kv_layernorm: Slot | None = None


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head with its own matrix: [s, b, n, i], [n, o, i] -> [s, b, n, o]."""
    return torch.einsum("sbni,noi->sbno", x, weight)


class MLASelfAttention(SelfAttentionBase):
    """Multi-latent self attention."""

    # Of absorbed weights.  Generation may set another one on an instance.
    multiply_heads: Callable[[Tensor, Tensor], Tensor] = staticmethod(multiply_heads)

    @property
    def query_width(self) -> int:
        """Width of the queries and keys of one head, d + r."""
        return self.config.qk_head_dim + self.config.qk_pos_emb_head_dim

    @property
    def value_width(self) -> int:
        """Total width of the values of all heads, on all ranks, without padding."""
        return self.config.num_attention_heads * self.config.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention scores: mscale^2 / sqrt(d + r), with YaRN's attention scaling."""
        mscale = yarn_mscale(self.config.rotary_scaling_factor, self.config.mscale)
        return mscale**2 / math.sqrt(self.query_width)

    def build_projections(self, submodules: MLASelfAttentionSubmodules) -> None:
        """Build the down-projections (replicated), latent norms and up-projections (sharded)."""
        c, heads = self.config, self.config.num_attention_heads
        self.local_heads = divide_over_group(heads, self.tp_group, "--num-attention-heads")
        self.is_sequence_sharded = c.sequence_parallel and self.tp_group.size() > 1

        def up(input_size: int, width: int) -> Any:
            return self.projection(submodules.linear_up, input_size, heads * width, bias=False)

        def down(width: int) -> ReplicatedLinear:
            return ReplicatedLinear(c.hidden_size, width, config=c, init_method=c.init_method)

        def norm(spec: Slot | None, width: int) -> Any:
            return build_norm(spec or nn.Identity, c, width)

        if c.q_lora_rank is None:
            self.linear_q_proj = up(c.hidden_size, self.query_width)
        else:
            self.linear_q_down_proj = down(c.q_lora_rank)
            self.q_layernorm = norm(submodules.q_layernorm, c.q_lora_rank)
            self.linear_q_up_proj = up(c.q_lora_rank, self.query_width)
        self.linear_kv_down_proj = down(c.kv_lora_rank + c.qk_pos_emb_head_dim)
        self.kv_layernorm = norm(submodules.kv_layernorm, c.kv_lora_rank)
        self.linear_kv_up_proj = up(c.kv_lora_rank, c.qk_head_dim + c.v_head_dim)
        self.recomputes_up = "mla_up_proj" in c.modules_to_recompute

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        *,
        inference_context: KVCache | None = None,
        rotary_pos_emb: RotaryTable | None = None,
        attention_bias: Any = None,
        **more: Any,
    ) -> WithBias:
        """See `SelfAttentionBase.forward`."""
        c = self.config
        cache = inference_context
        if cache is None or not c.cache_mla_latents:
            return super().forward(
                hidden_states,
                attention_mask,
                inference_context=cache,
                rotary_pos_emb=rotary_pos_emb,
                attention_bias=attention_bias,
                **more,
            )
        assert rotary_pos_emb is not None, "latent attention has rotary positions"
        narrow, key_position = self._narrow(hidden_states)
        rotated = apply_rotary(key_position.unsqueeze(2), rotary_pos_emb, fused=c.apply_rope_fusion)
        latents = torch.cat([narrow.unsqueeze(2), rotated], -1)  # the keys of all heads
        query, position = self._query(self._narrow_query(hidden_states), rotary_pos_emb)
        raising = self.linear_kv_up_proj.effective_weight().unflatten(0, (self.local_heads, -1))
        raises_key, raises_value = raising.split([c.qk_head_dim, c.v_head_dim], 1)
        lowered = self.multiply_heads(query, raises_key.transpose(1, 2))
        context = cache.attend(
            self.layer_number - 1,
            torch.cat([lowered, position], -1),
            latents,
            latents[..., :0],
            self.core_attention,
            mask=attention_mask,
            bias=attention_bias,
        )
        context = context.unflatten(-1, (self.local_heads, -1))[..., : c.kv_lora_rank]
        return self.linear_proj(self.multiply_heads(context, raises_value).flatten(2))

    def queries_keys_values(
        self, hidden_states: Tensor, rotary: RotaryTable | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project: [s, b, h] -> query and key [s, b, n/tp, d + r], and value.

        The core takes values of their own width in training.  Otherwise they are padded with zeros
        to the width of keys, which caches and some attention kernels require.
        """
        assert rotary is not None, "latent attention has rotary positions"
        narrow_query = self._narrow_query(hidden_states)
        narrow, key_position = self._narrow(hidden_states)
        # All heads share it and each rank has some of them, so gradients are summed over tp.
        if self.is_sequence_sharded:
            key_position = gather_from_sequence_parallel_region(key_position, group=self.tp_group)
        else:
            key_position = copy_to_tensor_model_parallel_region(key_position, self.tp_group)

        raised = partial(self._raised, rotary)
        if self.recomputes_up and self.training:
            return checkpoint(raised, False, narrow_query, narrow, key_position)
        return raised(narrow_query, narrow, key_position)

    def _narrow_query(self, hidden_states: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            return hidden_states
        narrow: Tensor = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        return narrow

    def _narrow(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized latents of keys and values [.., l], and the key channels to rotate.

        The latter [.., r] are shared by all heads.
        """
        c, narrow = self.config, self.linear_kv_down_proj(hidden_states)
        narrow, key_position = narrow.split([c.kv_lora_rank, c.qk_pos_emb_head_dim], -1)
        return self.kv_layernorm(narrow), key_position

    def _query(self, narrow_query: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """Return the queries [s, b, n/tp, d] and their rotated channels [s, b, n/tp, r]."""
        c = self.config
        linear_q = self.linear_q_proj if c.q_lora_rank is None else self.linear_q_up_proj
        query = linear_q(narrow_query)[0].unflatten(-1, (self.local_heads, -1))
        query, position = query.split([c.qk_head_dim, c.qk_pos_emb_head_dim], -1)
        return query, apply_rotary(position, rotary, fused=self.config.apply_rope_fusion)

    def _raised(
        self, rotary: RotaryTable, narrow_query: Tensor, narrow: Tensor, key_position: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        query = torch.cat(self._query(narrow_query, rotary), -1)
        key_value = self.linear_kv_up_proj(narrow)[0].unflatten(-1, (self.local_heads, -1))
        key, value = key_value.split([c.qk_head_dim, c.v_head_dim], -1)
        key_position = apply_rotary(
            key_position.unsqueeze(2), rotary, fused=self.config.apply_rope_fusion
        )
        key = torch.cat([key, key_position.expand(-1, -1, self.local_heads, -1)], -1)
        takes_narrow = getattr(self.core_attention, "takes_narrow_values", False)
        # A recomputed core keeps its inputs: a view would keep keys and values twice.
        if not self.training or self.recomputes_core or not takes_narrow:
            value = F.pad(value, (0, self.query_width - c.v_head_dim))
        return query, key, value

    def project_back(self, context: Tensor) -> WithBias:
        """Drop the padding of values, if any, and project: [s, b, n/tp (d + r)] -> [s, b, h]."""
        context = context.unflatten(-1, (self.local_heads, -1))[..., : self.config.v_head_dim]
        return self.linear_proj(context.flatten(-2))
