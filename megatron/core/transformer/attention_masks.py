"""Attention masks (causal, sliding window, packed sequences, padding) and the ALiBi bias.

Masks are bool, broadcastable to [b, n, q, k] and True where the query attends to the key.  The last
query has the position of the last key: with a KV cache the cached keys come first.  The
``attention_mask`` that callers pass to the model has the opposite sense, True where a key is
hidden; it is called ``hidden`` here.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams, sequence_index
from megatron.core.transformer.config.attention import AttentionConfig

Window = tuple[int, int]


def window_of_layer(config: AttentionConfig, layer_index: int) -> Window | None:
    """Return the (left, right) window of layer ``layer_index`` (from 0), None for full attention.

    Both count keys beside the query's own position; -1 is unlimited.
    """
    skip = config.window_attn_skip_freq
    if isinstance(skip, int):
        is_windowed = (layer_index + 1) % skip != 0
    else:
        is_windowed = skip is None or bool(skip[layer_index])
    return config.window_size if is_windowed else None


def causal_window(window: Window) -> Window:
    """Return the window without the keys after the query."""
    return window[0], 0


@lru_cache(maxsize=16)
def band(num_queries: int, num_keys: int, left: int, right: int, device: torch.device) -> Tensor:
    """Return the mask of keys from ``left`` before to ``right`` after the query: [q, k].

    -1 is unlimited.
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device)
    return band_at(query, torch.arange(num_keys, device=device), left, right)


def band_at(query: Tensor, key: Tensor, left: int, right: int) -> Tensor:
    """Return the mask of `band` for queries and keys at the given positions [q] and [k]."""
    seen = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
    if left >= 0:
        seen &= key >= query.unsqueeze(1) - left
    if right >= 0:
        seen &= key <= query.unsqueeze(1) + right
    return seen


def same_document(packed: PackedSeqParams, num_tokens: int) -> Tensor:
    """Return the mask of query-key pairs of the same packed sequence: [q, k]."""
    index = sequence_index(packed.ends, num_tokens)
    return index.unsqueeze(1) == index.unsqueeze(0)


def visible_keys(
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool,
    window: Window | None = None,
    hidden: Tensor | None = None,
    packed: PackedSeqParams | None = None,
    first_query: int | None = None,
) -> tuple[Tensor | None, bool]:
    """Return (mask, is_causal), the arguments of an attention kernel.

    (None, True): a plain causal mask with as many queries as keys; (None, False): no mask;
    (mask, False): ``mask`` contains everything, causality included.

    query [q, b, n, d], key [k, b, n, d].  ``hidden`` is True where a key is hidden.
    ``first_query``: key position of the first query; None if the last query is at the last key.
    """
    num_queries, num_keys = query.shape[0], key.shape[0]
    left, right = causal_window(window or (-1, -1)) if is_causal else window or (-1, -1)
    if left >= num_keys - 1:
        left = -1
    has_more = hidden is not None or packed is not None or left >= 0
    if not has_more and (right < 0 or num_queries == 1 and right == 0):
        return None, False
    if not has_more and right == 0 and num_queries == num_keys:
        return None, True
    if left < 0 and right < 0 and packed is None and hidden is not None:
        return ~hidden, False
    if first_query is None:
        mask = band(num_queries, num_keys, left, right, query.device)
    else:
        places = torch.arange(max(num_keys, first_query + num_queries), device=query.device)
        queries = places[first_query : first_query + num_queries]
        mask = band_at(queries, places[:num_keys], left, right)
    if packed is not None:
        mask = mask & same_document(packed, num_keys)
    if hidden is not None:
        mask = mask & ~hidden
    return mask, False


def is_causal_mask(hidden: Tensor) -> bool:
    """Return whether ``hidden`` [.., s, s] is the causal mask; synchronises with the device."""
    size = hidden.shape[-1]
    if hidden.shape[-2] != size:
        return False
    return not bool((hidden == band(size, size, -1, 0, hidden.device)).any())


def alibi_slopes(num_heads: int, where: torch.device | None = None) -> Tensor:
    """Return the ALiBi slope of each head (arXiv 2108.12409): [n] float32 on device ``where``."""

    def of_power_of_two(n: int) -> Tensor:
        return torch.arange(1, n + 1, device=where, dtype=torch.float64).mul(-8 / n).exp2()

    below = 2 ** math.floor(math.log2(num_heads))
    more = of_power_of_two(2 * below)[::2][: num_heads - below]
    return torch.cat([of_power_of_two(below), more]).float()


def alibi_bias(slopes: Tensor, queries: Tensor, num_keys: int) -> Tensor:
    """Return -slope * |query - key| for positions ``queries`` [q] and keys 0 .. k - 1.

    Returns [1, n, q, k] float32.
    """
    keys = torch.arange(num_keys, device=slopes.device)
    distance = (queries.unsqueeze(1) - keys).abs()
    return (-slopes[:, None, None] * distance).unsqueeze(0)
