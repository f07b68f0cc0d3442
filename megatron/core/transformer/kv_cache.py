"""Interface of KV caches as layers use it; `megatron.core.inference` implements the caches.

Layers compute the queries, keys and values of the new tokens of a pass; the cache stores keys and
values and runs attention over all tokens of each sequence.

Shapes: ``s`` new tokens, ``b`` sequences, ``n`` local heads, ``g`` local key/value heads, ``d``
head dimension.  A pass is either b sequences of s new tokens each, or one row (b = 1) with the
tokens of many sequences behind each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

# Attention core: query, key, value -> [s, b, n d]; see `DotProductAttention.forward`.
Core: TypeAlias = Callable[..., Tensor]
# Bias on attention scores: position of the first query, number of queries, number of keys
# -> [1, n, q, k].
PositionBias: TypeAlias = Callable[[int, int, int], Tensor]
State: TypeAlias = tuple[Tensor, ...]


class KVCache(Protocol):
    """Keys, values and recurrent states of all earlier tokens, of the layers of this stage."""

    def positions(self, num_tokens: int) -> tuple[Tensor, Tensor | int]:
        """Return the positions [s] of the new tokens, and the context length of each.

        The context length chooses the frequencies of LongRoPE: the tokens of the sequence up to
        this one, and at least those that it had when it started.
        """
        ...

    def attend(
        self,
        layer_index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        core: Core,
        *,
        mask: Tensor | None = None,
        bias: PositionBias | None = None,
    ) -> Tensor:
        """Cache keys and values [s, b, g, d] and attend with [s, b, n, d]: [s, b, n d].

        A value of width 0 means that the keys are the values too (latent vectors).  ``core``
        computes the attention of one sequence; a cache may use a faster kernel instead.
        """
        ...

    def attend_to_other(
        self,
        layer_index: int,
        query: Tensor,
        project: Callable[[], tuple[Tensor, Tensor]],
        core: Core,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to another sequence, whose keys and values ``project`` computes.

        They do not change, so that ``project`` runs once per layer and sequence.
        """
        ...

    def scan(
        self,
        layer_index: int,
        rows: State,
        step: Callable[[State, State | None], tuple[Tensor, State]],
    ) -> Tensor:
        """Run a recurrent layer (Mamba) over ``rows``, tensors [s, b, ..], from its cached state.

        ``step(rows, state)`` returns the output [s, b, ..] and the new state, tensors [b, ..];
        state None: zeros.
        """
        ...

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Return the rows [r, b, h] of the last layer's output whose logits are wanted."""
        ...
