"""Which keys a query may see, and biases that depend on their distance.

Masks are bool and True where the key is visible, of shape broadcastable to [b, n, q, k]; the last
query stands at the last key, so that a cache of earlier keys comes first.  A mask that a caller
hands to the model is the other way round: True where the key is hidden.
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
    """How far to the left and right layer ``layer_index`` (from 0) sees; None: everywhere."""
    skip = config.window_attn_skip_freq
    if isinstance(skip, int):
        is_windowed = (layer_index + 1) % skip != 0
    else:
        is_windowed = skip is None or bool(skip[layer_index])
    return config.window_size if is_windowed else None


def causal_window(window: Window) -> Window:
    """What is left of a window where later keys are hidden."""
    return window[0], 0


@lru_cache(maxsize=16)
def band(num_queries: int, num_keys: int, left: int, right: int, device: torch.device) -> Tensor:
    """Keys from ``left`` before to ``right`` after the query; -1 is no limit: [q, k]."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device)
    return band_at(query, torch.arange(num_keys, device=device), left, right)


def band_at(query: Tensor, key: Tensor, left: int, right: int) -> Tensor:
    """`band` for queries and keys at given positions [q] and [k]."""
    seen = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
    if left >= 0:
        seen &= key >= query.unsqueeze(1) - left
    if right >= 0:
        seen &= key <= query.unsqueeze(1) + right
    return seen


def same_document(packed: PackedSeqParams, num_tokens: int) -> Tensor:
    """Queries and keys of one packed sequence: [q, k]."""
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
    """The mask that attention needs beside plain causality, and whether that is all it needs.

    query [q, b, n, d], key [k, b, n, d].  (None, True): causal and nothing else, one query for
    each key.  (None, False): everything is visible.  (mask, False): the mask says it all.
    ``first_query`` is the place of the first query among the keys where the last one does not
    stand at the last key.
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
    """Whether ``hidden`` [.., s, s] hides later keys and nothing else."""
    size = hidden.shape[-1]
    if hidden.shape[-2] != size:
        return False
    return not bool((hidden == band(size, size, -1, 0, hidden.device)).any())


def alibi_slopes(num_heads: int, where: torch.device | None = None) -> Tensor:
    """How fast each head's attention falls with distance: [n] float32, made on ``where``."""

    def of_power_of_two(n: int) -> Tensor:
        return torch.arange(1, n + 1, device=where, dtype=torch.float64).mul(-8 / n).exp2()

    below = 2 ** math.floor(math.log2(num_heads))
    more = of_power_of_two(2 * below)[::2][: num_heads - below]
    return torch.cat([of_power_of_two(below), more]).float()


def alibi_bias(slopes: Tensor, queries: Tensor, num_keys: int) -> Tensor:
    """-slope * distance of queries at given places [q] to keys 0 .. k - 1: [1, n, q, k] float32."""
    keys = torch.arange(num_keys, device=slopes.device)
    distance = (queries.unsqueeze(1) - keys).abs()
    return (-slopes[:, None, None] * distance).unsqueeze(0)
