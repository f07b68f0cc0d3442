"""A key-value cache for a fixed batch of sequences that grow together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class StaticInferenceContext:
    """Keys and values of ``max_batch_size`` sequences of up to ``max_sequence_length`` tokens.

    The memory of a layer is allocated at its first `append`, in the width of those tensors.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._other: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Number of cached tokens per sequence."""
        return self._num_tokens

    def append(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] to a layer; return all its keys and values [t + s, b, g, d]."""
        if layer_index not in self._layers:
            self._layers[layer_index] = (self._memory(key), self._memory(value))
        keys, values = self._layers[layer_index]
        stop = self._num_tokens + key.size(0)
        if stop > self.max_sequence_length:
            raise ValueError(
                f"{stop} tokens do not fit into a cache of {self.max_sequence_length} a sequence"
            )
        batch = key.size(1)
        keys[self._num_tokens : stop, :batch] = key
        values[self._num_tokens : stop, :batch] = value
        return keys[:stop, :batch], values[:stop, :batch]

    def of_other_sequence(
        self, layer_index: int, project: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return cross-attention keys and values, which a layer projects once."""
        if layer_index not in self._other:
            self._other[layer_index] = project()
        return self._other[layer_index]

    def recurrent_state(self, layer_index: int) -> tuple[Tensor, ...] | None:
        """Return the recurrent state of a layer, or None before the first token."""
        return self._states.get(layer_index)

    def keep_state(self, layer_index: int, state: tuple[Tensor, ...]) -> None:
        """Replace the recurrent state of a layer."""
        self._states[layer_index] = state

    def advance(self, num_new_tokens: int) -> None:
        """Count the tokens of a finished forward pass."""
        self._num_tokens += num_new_tokens

    @property
    def num_bytes(self) -> int:
        """Number of bytes allocated."""
        kept = (*self._layers.values(), *self._other.values(), *self._states.values())
        return sum(x.nbytes for tensors in kept for x in tensors)

    def reset(self) -> None:
        """Remove all tokens but keep the memory of the growing sequence."""
        self._num_tokens = 0
        self._other.clear()
        self._states.clear()

    def _memory(self, like: Tensor) -> Tensor:
        size = (self.max_sequence_length, self.max_batch_size, *like.shape[2:])
        return torch.empty(size, dtype=like.dtype, device=like.device)
