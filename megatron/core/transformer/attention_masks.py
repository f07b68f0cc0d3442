"""Attention masks (causal, sliding window, packed sequences, padding) and the ALiBi bias.

Masks are bool, broadcastable to [b, n, q, k] and True where the query attends to the key.  The last
query has the position of the last key: with a KV cache the cached keys come first.  The
``attention_mask`` that callers pass to the model has the opposite sense, True where a key is
hidden; it is called ``hidden`` here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams, sequence_index
from megatron.core.transformer.config.attention import AttentionConfig

Window = tuple[int, int]


def is_layer_window_attention(
    sliding_window: Window | None,
    window_attn_skip_freq: int | Sequence[int] | None,
    layer_number: int,
) -> bool:
    """Return whether layer ``layer_number`` (from 1) has the window."""
    if sliding_window is None:
        return False
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return window_attn_skip_freq is None or bool(window_attn_skip_freq[layer_number - 1])


def window_of_layer(config: AttentionConfig, layer_index: int) -> Window | None:
    """Return the (left, right) window of layer ``layer_index`` (from 0), None for full attention.

    Both count keys beside the query's own position; -1 is unlimited.
    """
    window = config.window_size
    has_window = is_layer_window_attention(window, config.window_attn_skip_freq, layer_index + 1)
    return window if has_window else None


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


class VisibleKeys(NamedTuple):
    """The keys that each query attends to, as a description from which `mask` builds a mask.

    ``window`` (left, right) contains causality as right = 0; -1 is unlimited.  ``hidden`` is True
    where a key is hidden.  ``documents`` are not visible to each other; they cover all rows, with
    as many queries as keys.  ``first_query``: key position of the first query; None if the last
    query is at the last key.
    """

    num_queries: int
    num_keys: int
    window: Window
    hidden: Tensor | None = None
    packed: PackedSeqParams | None = None
    documents: PackedBounds | None = None
    num_rows: int = 1
    first_query: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether the keys are those of a plain causal mask with as many queries as keys."""
        is_plain = self.hidden is None and not self._has_parts
        return is_plain and self.window == (-1, 0) and self.num_queries == self.num_keys > 1

    @property
    def needs_mask(self) -> bool:
        """Whether a kernel that knows only ``is_causal`` needs a mask."""
        left, right = self.window
        if self.hidden is not None or left >= 0 or self._has_parts:
            return True
        is_all = right < 0 or (self.num_queries == 1 and right == 0)
        return not is_all and not self.is_causal

    @property
    def is_band(self) -> bool:
        """Whether a mask is needed, and window, packed sequences and documents describe it."""
        if self.hidden is not None or not self.needs_mask:
            return False
        is_at_end = self.first_query in (None, self.num_keys - self.num_queries)
        return is_at_end and (not self._has_parts or self.num_queries == self.num_keys)

    @property
    def _has_parts(self) -> bool:
        return self.packed is not None or self.documents is not None

    def mask(self, device: torch.device) -> Tensor | None:
        """Return the mask, causality included; None if no mask is needed."""
        if not self.needs_mask:
            return None
        hidden = self.hidden
        if hidden is not None and max(self.window) < 0 and not self._has_parts:
            return ~hidden
        if self.first_query is None:
            mask = band(self.num_queries, self.num_keys, *self.window, device)
        else:
            queries = self.first_query + torch.arange(self.num_queries, device=device)
            mask = band_at(queries, torch.arange(self.num_keys, device=device), *self.window)
        if self.packed is not None:
            sequence = sequence_index(self.packed.ends, self.num_keys)
            mask = mask & (sequence.unsqueeze(1) == sequence)
        if self.documents is not None:
            mask = mask & ~self.documents.hidden(self.num_rows, self.num_keys)
        return mask if hidden is None else mask & ~hidden


def visible_window(num_keys: int, window: Window | None, is_causal: bool) -> Window:
    """Return the window of a layer with ``num_keys`` keys: right is 0 if causal, -1 unlimited."""
    left, right = window or (-1, -1)
    return -1 if left >= num_keys - 1 else left, 0 if is_causal else right


def is_causal_mask(hidden: Tensor) -> bool:
    """Return whether ``hidden`` [.., s, s] is the causal mask; synchronizes with the device."""
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
    distance = (queries.unsqueeze(1) - torch.arange(num_keys, device=slopes.device)).abs()
    return (-slopes[:, None, None] * distance).unsqueeze(0)
