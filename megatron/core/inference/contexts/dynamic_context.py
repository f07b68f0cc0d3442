"""Sizes of `DynamicInferenceEngine`, under the names that Megatron-LM gives them.

In Megatron-LM this class holds the cache and the state of all requests.  Here the engine holds
them, in the pages of `paged_engine`: the context sets their sizes and counts requests.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from megatron.core.config.errors import ConfigError
from megatron.core.diagnostics.log_once import warn_once
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.paged_engine.collective_engine import CollectiveEngine
from megatron.core.inference.paged_engine.decode_graphs import captured_sizes
from megatron.core.inference.paged_engine.engine import EngineOptions

_ROUND_TO = 64  # tokens, of Megatron-LM's batches


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
        if not (buffer_size_gb > 0 and chunk_size_tokens > 0 and max_sequence_length > 0):
            raise ConfigError(
                f"DynamicInferenceContext: buffer_size_gb {buffer_size_gb}, chunk_size_tokens "
                f"{chunk_size_tokens}, max_sequence_length {max_sequence_length}: give sizes above "
                "0"
            )
        self.max_sequence_length = max_sequence_length
        self.chunk_size_tokens = chunk_size_tokens
        self.options = EngineOptions(
            buffer_bytes=int(buffer_size_gb * 2**30),
            page_size=chunk_size_tokens,
            guaranteed_fraction=buffer_guaranteed_fraction,
            overflow_factor=buffer_overflow_factor or 1.0,
            max_sequence_length=max_sequence_length,
            max_waiting=2**62,
            **_given(
                max_requests=max_requests_override,
                max_step_tokens=max_tokens_override,
                num_cuda_graphs=num_cuda_graphs,
            ),
        )
        self._engine: CollectiveEngine | None = None
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

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"DynamicInferenceContext has no {name}: the engine holds the cache and the state of "
            "all requests; use DynamicInferenceEngine"
        )

    def bind(self, engine: CollectiveEngine) -> None:
        """Report the state of ``engine`` from now on."""
        self._engine = engine

    @property
    def max_requests(self) -> int:
        """Requests that run at the same time; an estimate before there is an engine."""
        if self._engine is not None:
            return self._engine.limits.max_requests
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
        sizes = captured_sizes(self.options.num_cuda_graphs, self.max_requests)
        return sizes[::-1]

    def is_decode_only(self) -> bool:
        """Return whether the next step reads no prompt: all requests have a generated token."""
        return self._engine is not None and self._engine.is_decode_only

    def is_static_batching(self) -> bool:
        """Return False: requests join and leave the batch."""
        return False

    def has_unfinished_requests(self) -> bool:
        """Return whether the engine has unfinished requests."""
        return self._engine is not None and self._engine.has_unfinished

    def get_active_request_count(self) -> int:
        """Count unfinished requests of the engine, those that wait included."""
        return 0 if self._engine is None else self._engine.num_unfinished

    @classmethod
    def round_up_tokens(cls, value: int, tp_size: int | None = None) -> int:
        """Round ``value`` up to a multiple of 64 and of ``tp_size``."""
        step = -(-_ROUND_TO // (tp_size or 1)) * (tp_size or 1)
        return -(-value // step) * step

    @classmethod
    def round_up_requests(cls, value: int, tp_size: int | None = None) -> int:
        """Round ``value`` as `round_up_tokens` does: a request is one token of a step."""
        return cls.round_up_tokens(value, tp_size)


def _given(**values: int | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
