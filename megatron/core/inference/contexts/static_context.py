"""A key-value cache for a fixed batch of sequences that grow together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)
from megatron.core.transformer.kv_cache import Core, PositionBias, State


class StaticInferenceContext(BaseInferenceContext):
    """Keys and values of ``max_batch_size`` sequences of up to ``max_sequence_length`` tokens.

    The memory of a layer is allocated at its first `append`, in the width of those tensors.  All
    attention runs through the layer's own core: the plain reference of the paged cache.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        super().__init__(materialize_only_last_token_logits=True)
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._other: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[int, State] = {}
        self._is_decoding = False

    @classmethod
    def from_config(cls, config: InferenceWrapperConfig) -> StaticInferenceContext:
        """Return a context of the sizes in ``config``."""
        return cls(config.inference_max_requests, config.inference_max_seq_length)

    @property
    def num_tokens(self) -> int:
        """Number of cached tokens per sequence."""
        return self.sequence_len_offset

    def is_static_batching(self) -> bool:
        """Return True: all sequences grow together."""
        return True

    def enable_prefill_mode(self) -> None:
        """Note that the next passes process prompts."""
        self._is_decoding = False

    def enable_decode_mode(self) -> None:
        """Note that the next passes process one token a sequence."""
        self._is_decoding = True

    def is_decode_only(self) -> bool:
        """Return whether passes process one token a sequence."""
        return self._is_decoding

    def swap_key_value_dict(self, batch_idx: Tensor | list[int]) -> None:
        """Put the sequences of the batch into the order ``batch_idx``, as beam search does."""
        order = torch.as_tensor(batch_idx, device=device.current())
        for keys, values in (*self._layers.values(), *self._other.values()):
            keys[:, : len(order)] = keys[:, order]
            values[:, : len(order)] = values[:, order]
        for layer, state in self._states.items():
            self._states[layer] = tuple(part[order] for part in state)

    def positions(self, num_tokens: int) -> tuple[Tensor, int]:
        """Return the positions [s] of the next tokens, and the context length after them."""
        stop = self.sequence_len_offset + num_tokens
        return torch.arange(self.sequence_len_offset, stop, device=device.current()), stop

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
        """Append [s, b, g, d] to a layer and attend to all its tokens; see `KVCache`."""
        keys, values = self._append(layer_index, key, value)
        table = None if bias is None else bias(self.sequence_len_offset, len(query), len(keys))
        return core(query, keys, values if values.shape[-1] else keys, mask, attention_bias=table)

    def attend_to_other(
        self,
        layer_index: int,
        query: Tensor,
        project: Callable[[], tuple[Tensor, Tensor]],
        core: Core,
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attend to the other sequence, which a layer projects once."""
        if layer_index not in self._other:
            self._other[layer_index] = project()
        return core(query, *self._other[layer_index], mask)

    def scan(
        self,
        layer_index: int,
        rows: State,
        step: Callable[[State, State | None], tuple[Tensor, State]],
    ) -> Tensor:
        """Run a recurrent layer from its cached state and replace the state."""
        y, self._states[layer_index] = step(rows, self._states.get(layer_index))
        return y

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Return the last token of each sequence: [s, b, h] -> [1, b, h]."""
        return hidden[-1:]

    def advance(self, num_new_tokens: int) -> None:
        """Count the tokens of a finished forward pass: the caller's duty after each."""
        self.increment_sequence_len_offset(num_new_tokens)

    @property
    def num_bytes(self) -> int:
        """Number of bytes allocated."""
        kept = (*self._layers.values(), *self._other.values(), *self._states.values())
        return sum(x.nbytes for tensors in kept for x in tensors)

    def reset(self) -> None:
        """Remove all tokens but keep the memory of the growing sequence."""
        self.sequence_len_offset = 0
        self.enable_prefill_mode()
        self._other.clear()
        self._states.clear()

    def _append(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append [s, b, g, d] to a layer; return all its keys and values [t + s, b, g, d]."""
        if layer_index not in self._layers:
            self._layers[layer_index] = (self._memory(key), self._memory(value))
        keys, values = self._layers[layer_index]
        stop = self.sequence_len_offset + key.size(0)
        if stop > self.max_sequence_length:
            raise ValueError(
                f"{stop} tokens do not fit into a cache of {self.max_sequence_length} a sequence"
            )
        batch = key.size(1)
        keys[self.sequence_len_offset : stop, :batch] = key
        values[self.sequence_len_offset : stop, :batch] = value
        return keys[:stop, :batch], values[:stop, :batch]

    def _memory(self, like: Tensor) -> Tensor:
        size = (self.max_sequence_length, self.max_batch_size, *like.shape[2:])
        return torch.empty(size, dtype=like.dtype, device=like.device)
