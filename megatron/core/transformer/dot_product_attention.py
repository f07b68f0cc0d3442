"""Dot-product attention, softmax(q k^T / sqrt(d)) v, by torch's kernels or in plain operations.

``q`` queries, ``k`` keys, ``b`` sequences, ``n`` local heads, ``g`` local key/value heads
(n a multiple of g), ``d`` head dimension.  Inputs are [q or k, b, n or g, d], the output is
[q, b, n d].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.causal_attention import causal_attention
from megatron.core.fusions.paged_attention import PagedRule
from megatron.core.packed_seq_params import AttentionMask, PackedBounds, PackedSeqParams
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_init import new_parameter, param_info_for
from megatron.core.tensor_parallel.layers import divide_over_group
from megatron.core.tensor_parallel.random import fork_if
from megatron.core.transformer.attention_backends import (
    BLOCKS,
    FLASH,
    FUSED,
    PLAIN,
    OnlyKernels,
    choose_for,
)
from megatron.core.transformer.attention_blocks import (
    QKV,
    ScoreRule,
    attend_to_band,
    attend_to_narrow,
    block_kernel,
    wide,
)
from megatron.core.transformer.attention_masks import (
    VisibleKeys,
    Window,
    band,
    visible_window,
    window_of_layer,
)
from megatron.core.transformer.context_parallel import (
    AttentionContext,
    Ring,
    RingPlan,
    context_parallel_comm_of,
    ring_attention,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class DotProductAttention(MegatronModule):
    """The attention core; `attention_backends.choose` selects a kernel for each kind of call.

    ``sdpa`` is PyTorch's function; the memory planner replaces it by one that only counts memory.
    """

    sdpa: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)
    takes_narrow_values = True  # than keys; otherwise the caller pads them

    @library_call(
        "config layer_number attn_mask_type attention_type attention_dropout softmax_scale "
        "cp_comm_type model_comm_pgs",
        unused="k_channels v_channels num_splits",
    )
    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        """Create the core.  ``layer_number`` counts from 1.

        ``cp_comm_type`` overrides the config's.
        """
        super().__init__(config)
        self.layer_number = layer_number
        self.attn_mask_type, self.attention_type = attn_mask_type, attention_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softcap = config.attn_logit_softcapping
        is_cross = attention_type == "cross"  # a window needs positions in one sequence
        self.window = None if is_cross else window_of_layer(config, layer_number - 1)
        self.cp_comm = context_parallel_comm_of(
            config, layer_number - 1, pg_collection, cp_comm_type
        )
        scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.softmax_scale = 1 / math.sqrt(config.kv_channels) if scale is None else scale
        # Scores of deep layers are divided by the depth before the softmax and multiplied inside
        # it: the same result, and fp16 scores do not overflow.
        self.depth_scale = layer_number if config.apply_query_key_layer_scaling else 1
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":  # one score for each local head
            tp_group = pg_collection.tp
            heads = config.num_attention_heads
            info = param_info_for((heads,), config.init_method, over=tp_group)
            heads = divide_over_group(heads, tp_group, "--num-attention-heads")
            self.softmax_offset = new_parameter((heads,), config.params_dtype, info)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend: [q, b, n, d], 2 x [k, b, g, d] -> [q, b, n d].

        Values may be narrower than keys, [k, b, g, v]: the output is [q, b, n v], or [q, b, n d]
        with d - v zeros at the end of each head.  ``attention_mask`` is True where a key is hidden,
        or the bounds of documents in all rows; ``attention_bias`` [1, n, q, k] is added to the
        scores.  Both apply in addition to the causal mask.  With context parallelism, q and k are
        this rank's tokens, masks and biases have columns for the tokens of all ranks, and the call
        is collective over cp, also backward.
        """
        if query.dim() == 3:  # packed tokens as projects pass them: [t, n, d]
            return self.forward(
                query.unsqueeze(1),
                key.unsqueeze(1),
                value.unsqueeze(1),
                attention_mask,
                attn_mask_type,
                attention_bias,
                packed_seq_params,
            ).squeeze(1)
        kind = attn_mask_type or self.attn_mask_type
        hidden = attention_mask if isinstance(attention_mask, Tensor) else None
        # An arbitrary mask says which later keys are seen; without one there are none.
        is_causal = kind in CAUSAL or (kind == AttnMaskType.arbitrary and hidden is None)
        # Padding comes after the last sequence: a causal mask hides it already.
        if packed_seq_params is not None and not is_causal:
            num_keys = key.shape[0] * (1 if self.cp_comm is None else self.cp_comm.cp.size())
            padding = packed_seq_params.is_padding(num_keys)
            if padding is not None:
                padding = padding[None, None, None]
                hidden = padding if hidden is None else hidden | padding
        context = AttentionContext(
            is_causal=is_causal,
            hidden=hidden,
            bias=attention_bias,
            packed=packed_seq_params,
            documents=attention_mask if isinstance(attention_mask, PackedBounds) else None,
            sink=self._sink(query),
        )
        if value.shape[-1] != query.shape[-1]:
            if self._attends_to_narrow(query, value, context):
                return attend_to_narrow(query, key, value, self.softmax_scale)
            value = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
        qkv = query, key, value
        comm = self.cp_comm
        return self.attend(qkv, context) if comm is None else comm.attend(self, qkv, context)

    def _attends_to_narrow(self, query: Tensor, value: Tensor, context: AttentionContext) -> bool:
        """Return whether a kernel takes ``value`` as it is, narrower than ``query``."""
        hiding = (context.hidden, context.packed, context.documents, context.sink, self.cp_comm)
        is_special = any(x is not None for x in hiding)
        is_grouped = query.shape[2] != value.shape[2]
        names = self._choose(
            query,
            context,
            has_mask=is_special or is_grouped or not context.is_causal,
            has_band=self.window is not None,
            causal_tokens=len(query) if self.training else 0,
            value_dim=value.shape[-1],
        )
        return names == (FUSED,)

    def paged_rule(self, query: Tensor) -> PagedRule:
        """Return how this layer attends, for `paged_attention` with queries like ``query``."""
        left = -1 if self.window is None else self.window[0]
        return PagedRule(
            scale=self.softmax_scale,
            softcap=self.softcap,
            window=None if left < 0 else left,
            sink=self._sink(query),
        )

    def _sink(self, query: Tensor) -> Tensor | None:
        """Return the score of the sink per head [n] in the dtype of scores, None without a sink."""
        if self.config.softmax_type == "vanilla":
            return None
        if self.softmax_offset is None:
            return query.new_zeros(query.shape[2], dtype=wide(query))
        return self.softmax_offset.to(wide(query))

    def attend(self, qkv: QKV, context: AttentionContext) -> Tensor:
        """Attend on this rank alone: [q, b, n, d], 2 x [k, b, g, d] -> [q, b, n d]."""
        query, key, value = qkv
        where = query.device
        dropout = self._dropout()
        if _is_packed_on_cpu(query, key, context):
            return self._attend_one_by_one(qkv, context)
        if context.sink is not None and _is_one_row(query, key, context):
            # Only block kernels return the log-sum-exp that a sink changes.
            return self.attend_in_ring(qkv, context, Ring(None))
        visible = VisibleKeys(
            num_queries=query.shape[0],
            num_keys=key.shape[0],
            window=visible_window(key.shape[0], self._window(context), context.is_causal),
            hidden=context.hidden,
            packed=context.packed,
            documents=context.documents,
            num_rows=query.shape[1],
            first_query=context.first_query,
        )
        names: tuple[str, ...] = (PLAIN,)
        if context.sink is None:
            names = self._choose(
                query,
                context,
                has_mask=visible.needs_mask and not visible.is_band,
                has_band=visible.is_band,
                # Decided by training mode, not by grad mode: the forward pass without gradients and
                # its recomputation must choose the same kernel, or they would sample different
                # dropout.
                causal_tokens=len(query) if visible.is_causal and self.training else 0,
            )
        if visible.is_band and FLASH in names and device.is_cuda(where):
            return attend_to_band(query, key, value, visible, self.softmax_scale)
        if BLOCKS in names:
            return self.attend_by_blocks(query, key, value)
        with fork_if(dropout > 0):
            mask = visible.mask(where)
            if mask is not None and self.window is not None and not context.is_causal:
                # A query in the padding may attend to no key, and an empty softmax is NaN: let it
                # attend to all keys.
                mask = mask | ~mask.any(-1, keepdim=True)
            if visible.is_causal and (PLAIN in names or context.bias is not None):
                mask = band(len(query), len(key), -1, 0, where)
            q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
            if PLAIN in names:
                out = self._plain((q, k, v), mask, context)
            else:
                is_causal = visible.is_causal and mask is None
                out = self._kernel(names, (q, k, v), mask, context.bias, is_causal)
        return out.permute(2, 0, 1, 3).flatten(2)

    def attend_by_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, masks: Sequence[Tensor | None] = ()
    ) -> Tensor:
        """Attend causally by a CPU's kernel for training; ``masks`` of `causal_attention`."""
        fused, dropout = self.config.masked_softmax_fusion, self._dropout()
        with fork_if(dropout > 0):
            out = causal_attention(
                query, key, value, self.softmax_scale, dropout, fused=fused, masks=masks
            )
        return out.flatten(2)

    def trains_by_blocks(self, query: Tensor, context: AttentionContext) -> bool:
        """Return whether a plain causal pass of these queries trains by `attend_by_blocks`."""
        tokens = len(query) if self.training and context.hidden is None else 0
        names = self._choose(query, context, has_mask=False, has_band=False, causal_tokens=tokens)
        return BLOCKS in names

    def _attend_one_by_one(self, qkv: QKV, context: AttentionContext) -> Tensor:
        """Attend to each packed sequence alone: a CPU's kernels compute all scores of a mask.

        split() and cat() copy once in backward; slices would add a complete gradient each.
        """
        assert context.packed is not None, "called for packed sequences"
        lengths = context.packed.lengths
        rest = len(qkv[0]) - sum(lengths)  # tokens after the last sequence
        sizes = (*lengths, rest) if rest else lengths
        parts = zip(*(x.split(sizes) for x in qkv), strict=True)
        alone = context._replace(packed=None)
        return torch.cat([self.attend(part, alone) for part in parts])

    def attend_in_ring(self, qkv: QKV, context: AttentionContext, ring: Ring) -> Tensor:
        """Attend to the keys and values of all ranks of the ring; shapes as in `attend`.

        Collective over the ring.
        """
        num_rows = len(qkv[0])
        num_tokens = num_rows * ring.size
        context = context.with_own_rows(num_rows, num_tokens)
        names = self._choose(
            qkv[0],
            context,
            has_mask=context.hidden is not None,
            has_band=self.window is not None,
            by_blocks=True,
        )
        plan = RingPlan(
            ring=ring,
            lengths=context.lengths(num_tokens),
            kernel=block_kernel(FUSED if FUSED in names else names[0]),
            rule=self._score_rule(),
            context=context,
            window=self._window(context),
        )
        with fork_if(self._dropout() > 0):
            return ring_attention(*qkv, plan).flatten(2)

    def _window(self, context: AttentionContext) -> Window | None:
        """Return the window of a call; an arbitrary mask alone limits it to the right."""
        if self.window is None:
            return None
        left, right = self.window
        if context.is_causal:
            return left, 0
        return left, -1 if self.attn_mask_type == AttnMaskType.arbitrary else right

    def _score_rule(self) -> ScoreRule:
        return ScoreRule(
            scale=self.softmax_scale,
            depth_scale=self.depth_scale,
            softcap=self.softcap,
            dropout=self._dropout(),
        )

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    def _choose(
        self, query: Tensor, context: AttentionContext, **properties: Any
    ) -> tuple[str, ...]:
        return choose_for(
            self.config.attention_backend,
            device.current(),
            dtype=query.dtype,
            head_dim=query.shape[-1],
            is_cuda=device.is_cuda(query.device),
            has_bias=context.bias is not None,
            has_dropout=self._dropout() > 0,
            has_softcap=self.softcap is not None,
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            **properties,
        )

    def _kernel(
        self,
        names: tuple[str, ...],
        qkv: QKV,
        mask: Tensor | None,
        bias: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        query, key, value = qkv
        if bias is not None:
            bias = bias.to(query.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
        is_cuda = device.is_cuda(query.device)
        if is_cuda and FLASH not in names:  # only flash supports fewer key heads
            query, key, value = _repeat_heads(query, key, value)
        with OnlyKernels(names) if is_cuda else nullcontext():
            return self.sdpa(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=self._dropout(),
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )

    def _plain(self, qkv: QKV, mask: Tensor | None, context: AttentionContext) -> Tensor:
        query, key, value = _repeat_heads(*qkv)
        scale = self.softmax_scale / self.depth_scale
        scores = torch.matmul(query * scale, key.transpose(-1, -2))
        if self.config.attention_softmax_in_fp32:
            scores = scores.to(wide(scores))
        scores = self._score_rule().finish(scores, context.bias)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        if context.sink is not None:
            sink = context.sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], -1)
        probs = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
        if self._dropout() > 0:
            probs = F.dropout(probs, self._dropout())
        return torch.matmul(probs, value)


def _is_packed_on_cpu(query: Tensor, key: Tensor, context: AttentionContext) -> bool:
    """Return whether packed sequences are self-attention that no mask and bias describes."""
    others = (context.hidden, context.documents, context.bias, context.sink, context.first_query)
    if context.packed is None or device.is_cuda(query.device):
        return False
    return len(query) == len(key) and all(x is None for x in others)


def _is_one_row(query: Tensor, key: Tensor, context: AttentionContext) -> bool:
    """Return whether it is self-attention without padding, documents and a trainable bias."""
    packed, num_tokens = context.packed, query.shape[0]
    is_filled = packed is None or sum(packed.lengths) == num_tokens
    has_gradient = context.bias is not None and context.bias.requires_grad
    is_same = context.first_query is None and key.shape[0] == num_tokens
    return context.documents is None and is_same and is_filled and not has_gradient


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> QKV:
    """Repeat keys and values [b, g, k, d] -> [b, n, k, d], one head for each query head."""
    times = query.shape[1] // key.shape[1]
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    return query, key, value
