"""What attention asks of a cache of keys and values; `megatron.core.inference` has the caches.

Shapes: ``s`` new tokens, ``t`` tokens kept before, ``b`` sequences, ``g`` local key/value heads,
``d`` head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class KVCache(Protocol):
    """Keys and values of the tokens seen so far, for all layers of this stage."""

    @property
    def num_tokens(self) -> int:
        """``t``: tokens kept for each sequence, the position of the first new one."""
        ...

    def append(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep [s, b, g, d] of a layer; returns keys and values of all [t + s, b, g, d].

        Latent attention may keep its narrow vectors instead, and values of no width.
        ``num_tokens`` grows when the caller is done with all layers (`advance`), not here.
        """
        ...

    def of_other_sequence(
        self, layer_index: int, project: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """What ``project`` gave when the layer first asked: keys and values of cross attention."""
        ...

    def recurrent_state(self, layer_index: int) -> tuple[Tensor, ...] | None:
        """What a layer that carries a state along the sequence has kept; None before any token."""
        ...

    def keep_state(self, layer_index: int, state: tuple[Tensor, ...]) -> None:
        """Keep it, in place of what was there."""
        ...

    def advance(self, num_new_tokens: int) -> None:
        """Count the tokens of a finished forward pass."""
        ...
