"""Interface of KV caches as layers use it; `megatron.core.inference` implements the caches.

Shapes: ``s`` new tokens, ``t`` cached tokens, ``b`` sequences, ``g`` local key/value heads, ``d``
head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class KVCache(Protocol):
    """Keys and values of all earlier tokens, for all layers of this pipeline stage."""

    @property
    def num_tokens(self) -> int:
        """Number of cached tokens ``t`` per sequence, which is the position of the next token."""
        ...

    def append(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Cache keys and values [s, b, g, d] of a layer; return those of all tokens [t + s, ...].

        Multi-latent attention may cache latent vectors as keys, with values of width 0.
        ``num_tokens`` does not change: the caller calls `advance` after the last layer.
        """
        ...

    def of_other_sequence(
        self, layer_index: int, project: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of cross attention: those of the layer's first ``project()``.

        ``project`` runs once per layer, since the other sequence does not change.
        """
        ...

    def recurrent_state(self, layer_index: int) -> tuple[Tensor, ...] | None:
        """Return the cached state of a recurrent layer (Mamba); None before the first token."""
        ...

    def keep_state(self, layer_index: int, state: tuple[Tensor, ...]) -> None:
        """Replace the cached state of a recurrent layer."""
        ...

    def advance(self, num_new_tokens: int) -> None:
        """Add the tokens of a finished forward pass to ``num_tokens``."""
        ...
