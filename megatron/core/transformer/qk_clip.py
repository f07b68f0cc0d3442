"""QK-clip of MuonClip (Kimi K2, arXiv 2507.20534): bound the attention logits of each head.

In training every self-attention layer records the largest logit of each head, which is the scaled
product of a query and a visible key, without position biases.  After the update of a step the
optimizer multiplies the rows of the query and key projections by powers of
f = min(1, threshold / largest logit) whose product is f.  Heads of a query group share a key, so
the largest logit of the group decides for all of them.

Attention kernels do not return the largest logit: it costs one more q k^T per layer and forward
pass, computed for `_QUERIES` queries at a time, and with context parallelism an all-gather of keys.

``s`` local tokens, ``S`` tokens of all context-parallel ranks, ``b`` sequences, ``n`` local query
heads, ``g`` local key heads, ``d`` head dimension.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.packed_seq_params import (
    AttentionMask,
    PackedBounds,
    PackedSeqParams,
    sequence_index,
)
from megatron.core.parallel.context_parallel_partition import (
    held_tokens,
    order_of_gathered,
    row_lengths,
)
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.transformer.attention_blocks import wide
from megatron.core.transformer.attention_masks import band_at, visible_window
from megatron.core.transformer.dot_product_attention import CAUSAL

_QUERIES = 256  # bounds the memory of the logits: b n x 256 x S values


@torch.no_grad()
def largest_logits(
    query: Tensor,
    key: Tensor,
    core: Any,
    cp: ProcessGroup,
    mask: AttentionMask | None = None,
    packed: PackedSeqParams | None = None,
) -> Tensor:
    """Return the largest logit of each head over this rank's queries: [n], fp32.

    ``query`` [s, b, n, d] and ``key`` [s, b, g, d] as the attention ``core`` receives them, which
    determines scale, window and causality; ``mask`` is True where a key is hidden, or the bounds of
    documents.  -inf for a head without a visible key.  Collective over ``cp``.
    """
    scale: float | None = getattr(core, "softmax_scale", None)
    if scale is None:
        raise ConfigError(
            f"--qk-clip: the spec's core attention {type(core).__name__} has no softmax_scale; use "
            "DotProductAttention or a class derived from it"
        )
    num_queries = len(query)
    total = num_queries * cp.size()
    places = every = torch.arange(total, device=query.device)
    if cp.size() > 1:
        lengths = row_lengths(None if packed is None else packed.lengths, total)
        places = held_tokens(lengths, cp.rank(), cp.size(), query.device)
        order, _ = order_of_gathered(lengths, tuple(range(cp.size())), cp.size(), query.device)
        key = all_gather_first_dim(key, cp).index_select(0, order)
    is_causal = core.attn_mask_type in CAUSAL
    window = visible_window(total, core.window, is_causal)
    parts = _parts(mask, packed, query.shape[1], total)
    queries = query.permute(1, 2, 0, 3).unflatten(1, (key.shape[2], -1))
    keys = key.permute(1, 2, 3, 0).unsqueeze(2)
    largest = query.new_full((query.shape[2],), -math.inf, dtype=wide(query))
    for start in range(0, num_queries, _QUERIES):
        rows = slice(start, start + _QUERIES)
        place = places[rows]
        stop = rows.stop if is_causal and cp.size() == 1 else total  # later keys are hidden
        seen = band_at(place, every[:stop], *window)
        if parts is not None:
            of_keys = parts[:, None, None, :stop]
            seen = seen & (parts[:, place][:, None, :, None] == of_keys) & (of_keys >= 0)
        if isinstance(mask, Tensor):
            hidden = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            seen = seen & ~hidden[..., :stop]
        logits = torch.matmul(queries[..., rows, :], keys[..., :stop]).flatten(1, 2)
        logits = logits.masked_fill(~seen, -math.inf)
        largest = torch.maximum(largest, logits.amax((0, 2, 3)).to(largest.dtype))
    return largest * scale


def _parts(
    mask: AttentionMask | None, packed: PackedSeqParams | None, num_rows: int, total: int
) -> Tensor | None:
    """Return the sequence or document of each token, [1 or b, S], -1 in padding; None if one."""
    if isinstance(mask, PackedBounds):
        return sequence_index(mask.cumulative, num_rows * total).view(num_rows, total)
    if packed is None:
        return None
    parts = sequence_index(packed.ends, total)
    padding = packed.is_padding(total)
    return (parts if padding is None else parts.masked_fill(padding, -1)).unsqueeze(0)


def clip_factors(largest: Tensor, threshold: float) -> Tensor:
    """Return the factor of the logits of each head, 1 up to ``threshold``."""
    return torch.where(largest > threshold, threshold / largest, torch.ones_like(largest))
