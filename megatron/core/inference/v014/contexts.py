"""Sizes of generation, and contexts: a cache for forward passes of scripts, and engine sizes."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.inference.paged_engine.cache import PagedCache
from megatron.core.inference.paged_engine.decode_graphs import captured_sizes
from megatron.core.inference.paged_engine.engine import EngineOptions
from megatron.core.transformer.kv_cache import Core, PositionBias, State

if TYPE_CHECKING:
    from megatron.core.inference.v014.engines import DynamicInferenceEngine

_ROUND_TO = 64  # tokens, of Megatron-LM's batches


@dataclass
class InferenceWrapperConfig:
    """Sizes of generation.

    ``inference_max_requests`` run at the same time, each of up to ``inference_max_seq_length``
    tokens.  The other fields have no effect: model and tokenizer decide.
    """

    hidden_size: int
    params_dtype: torch.dtype
    inference_batch_times_seqlen_threshold: int
    padded_vocab_size: int
    inference_max_requests: int = 8
    inference_max_seq_length: int = 2560
    fp32_residual_connection: bool = False
    nccl_all_reduce_for_prefill: bool = False
    fp8: str | None = None

    def add_attributes(self, attribute_value_pair: Mapping[str, object]) -> None:
        """Set further attributes."""
        vars(self).update(attribute_value_pair)


class BaseInferenceContext(abc.ABC):
    """Base class of contexts.

    ``materialize_only_last_token_logits``: compute logits of the last token of a sequence only.
    """

    def __init__(self, materialize_only_last_token_logits: bool) -> None:
        self.materialize_only_last_token_logits = materialize_only_last_token_logits
        self.sequence_len_offset = 0
        self.batch_size_offset = 0

    @abc.abstractmethod
    def is_static_batching(self) -> bool:
        """Return whether all sequences of the batch grow together."""

    def is_dynamic_batching(self) -> bool:
        """Return whether requests join and leave a running batch."""
        return not self.is_static_batching()

    def increment_sequence_len_offset(self, increment: int) -> None:
        """Count the tokens of a finished forward pass."""
        self.sequence_len_offset += increment

    def increment_batch_size_offset(self, increment: int) -> None:
        """Count the sequences of the batch that earlier micro-batches had."""
        self.batch_size_offset += increment

    def reset_batch_size_offset(self) -> None:
        """Begin with the first sequence of the batch again."""
        self.batch_size_offset = 0


class StaticInferenceContext(BaseInferenceContext):
    """Keys and values of ``max_batch_size`` sequences that grow together in a script's own loop.

    Each sequence has one page of ``max_sequence_length`` tokens and one slot of a `PagedCache`.
    All attention runs through the layer's own core: the plain reference of the paged kernels.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        super().__init__(materialize_only_last_token_logits=True)
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self._cache = PagedCache(max_batch_size, max_sequence_length, max_batch_size)
        self._is_decoding = False

    @classmethod
    def from_config(cls, config: InferenceWrapperConfig) -> StaticInferenceContext:
        """Return a context of the sizes in ``config``."""
        return cls(config.inference_max_requests, config.inference_max_seq_length)

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
        order = torch.as_tensor(batch_idx).tolist()
        self._cache.copy_pages(list(zip(order, range(len(order)), strict=True)))
        for layer in self._cache.states:
            state = self._cache.state(layer, order)
            self._cache.keep_state(layer, range(len(order)), state)
        for place, (keys, values) in self._cache.others.items():
            self._cache.others[place] = keys[:, order], values[:, order]

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
        start = self.sequence_len_offset
        stop = start + len(key)
        batch = key.size(1)
        if stop > self.max_sequence_length:
            raise ValueError(
                f"{stop} tokens do not fit into a cache of {self.max_sequence_length} a sequence"
            )
        pages = self._cache.layer(layer_index, key, value)
        for held, new in zip(pages, (key, value), strict=True):
            held[:batch, start:stop] = new.transpose(0, 1)
        keys, values = (held[:batch, :stop].transpose(0, 1) for held in pages)
        table = None if bias is None else bias(start, len(query), stop)
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
        """Attend to the other sequences of the batch, which a layer projects once."""
        place = layer_index, 0
        if place not in self._cache.others:
            self._cache.others[place] = project()
        return core(query, *self._cache.others[place], mask)

    def scan(
        self,
        layer_index: int,
        rows: State,
        step: Callable[[State, State | None], tuple[Tensor, State]],
    ) -> Tensor:
        """Run a recurrent layer from its cached state and replace the state."""
        slots = range(rows[0].size(1))
        past = self._cache.state(layer_index, slots) if self.sequence_len_offset else None
        y, state = step(rows, past)
        self._cache.keep_state(layer_index, slots, state)
        return y

    def output_rows(self, hidden: Tensor) -> Tensor:
        """Return the last token of each sequence: [s, b, h] -> [1, b, h]."""
        return hidden[-1:]

    def reset(self) -> None:
        """Remove all tokens."""
        self.sequence_len_offset = 0
        self.enable_prefill_mode()
        self._cache.clear()


class InferenceParams(StaticInferenceContext):
    """The name of `StaticInferenceContext` before Megatron Core 0.12, with a warning."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        warnings.warn(
            "InferenceParams is now called StaticInferenceContext "
            "(megatron.core.inference.contexts)",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(max_batch_size, max_sequence_length)


class ContextOverflowError(Exception):
    """A request that a context has no place for."""


class RequestOverflowError(ContextOverflowError):
    """Too many requests."""


class TokenOverflowError(ContextOverflowError):
    """Too many tokens in a step."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """A prompt that is too long with the tokens to generate."""


class ChunkOverflowError(ContextOverflowError):
    """A request that needs more pages than the cache has."""


class ActiveRequestCountOverflowError(ContextOverflowError):
    """More requests are active than a context can hold."""

    def __init__(self, max_request_count: int, active_request_count: int) -> None:
        super().__init__(
            f"{active_request_count} requests are active, at most {max_request_count} can be"
        )


class DynamicInferenceContext(BaseInferenceContext):
    """Sizes of a dynamic engine: a cache of ``buffer_size_gb`` in pages of ``chunk_size_tokens``.

    In Megatron-LM this class holds the cache and the state of all requests; here the engine does.
    The shapes of the model's layers serve to report sizes before there is an engine, which measures
    them.
    """

    def __init__(
        self,
        *,
        params_dtype: torch.dtype,
        num_layers: int,
        kv_channels: int,
        num_attention_heads: int,
        max_sequence_length: int,
        buffer_size_gb: float,
        buffer_guaranteed_fraction: float,
        chunk_size_tokens: int = 256,
        buffer_overflow_factor: float | None = None,
        max_requests_override: int | None = None,
        max_tokens_override: int | None = None,
        tensor_model_parallel_size: int | None = None,
        cache_mla_latent: bool = False,
        kv_lora_rank: int | None = None,
        qk_pos_emb_head_dim: int | None = None,
        num_cuda_graphs: int | None = None,
        materialize_only_last_token_logits: bool = True,
    ) -> None:
        super().__init__(materialize_only_last_token_logits)
        self.max_sequence_length = max_sequence_length
        self.chunk_size_tokens = chunk_size_tokens
        given: dict[str, Any] = {
            "max_step_tokens": max_tokens_override,
            "num_cuda_graphs": num_cuda_graphs,
        }
        self.options = EngineOptions(
            buffer_bytes=int(buffer_size_gb * 2**30),
            page_size=chunk_size_tokens,
            guaranteed_fraction=buffer_guaranteed_fraction,
            overflow_factor=buffer_overflow_factor or 1.0,
            max_sequence_length=max_sequence_length,
            max_waiting=2**62,
            max_requests=max_requests_override,
            **{name: value for name, value in given.items() if value is not None},
        )
        self.engine: DynamicInferenceEngine | None = None  # that this context belongs to
        heads = -(-num_attention_heads // (tensor_model_parallel_size or 1))
        row_bytes = 2 * params_dtype.itemsize * num_layers * heads * kv_channels
        if cache_mla_latent and kv_lora_rank and qk_pos_emb_head_dim:
            row_bytes = params_dtype.itemsize * num_layers * (kv_lora_rank + qk_pos_emb_head_dim)
        self._num_sequences = self.options.buffer_bytes / (row_bytes * max_sequence_length)
        if not materialize_only_last_token_logits:
            warn_once(
                "DynamicInferenceContext: materialize_only_last_token_logits=False has no effect: "
                "log-probabilities of a prompt are computed for the requests that ask for them"
            )

    @property
    def max_requests(self) -> int:
        """Requests that run at the same time; an estimate before there is an engine."""
        if self.engine is not None:
            return self.engine.max_requests
        asked = self.options.max_requests
        return asked or max(int(self._num_sequences * self.options.overflow_factor), 1)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt: one that is longer than a step is read in several."""
        return max(self.options.max_step_tokens, self.max_sequence_length)

    @property
    def gtd_request_count(self) -> int:
        """Requests of the greatest length for which the guaranteed part of the cache suffices."""
        return max(int(self._num_sequences * self.options.guaranteed_fraction), 1)

    @property
    def cuda_graph_token_counts(self) -> list[int]:
        """Numbers of requests whose decode steps are captured, the largest first."""
        return captured_sizes(self.options.num_cuda_graphs, self.max_requests)[::-1]

    def is_decode_only(self) -> bool:
        """Return whether the next step reads no prompt: all requests have a generated token."""
        return self.engine is not None and self.engine.is_decode_only

    def is_static_batching(self) -> bool:
        """Return False: requests join and leave the batch."""
        return False

    def has_unfinished_requests(self) -> bool:
        """Return whether the engine has unfinished requests."""
        return self.get_active_request_count() > 0

    def get_active_request_count(self) -> int:
        """Count unfinished requests of the engine, those that wait included."""
        return 0 if self.engine is None else len(self.engine.requests)

    @classmethod
    def round_up_tokens(cls, value: int, tp_size: int | None = None) -> int:
        """Round ``value`` up to a multiple of 64 and of ``tp_size``."""
        step = -(-_ROUND_TO // (tp_size or 1)) * (tp_size or 1)
        return -(-value // step) * step

    @classmethod
    def round_up_requests(cls, value: int, tp_size: int | None = None) -> int:
        """Round ``value`` as `round_up_tokens` does: a request is one token of a step."""
        return cls.round_up_tokens(value, tp_size)
