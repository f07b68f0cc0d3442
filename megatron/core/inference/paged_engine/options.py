"""Sizes of a generation engine.  No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

DraftKind: TypeAlias = Literal["ngram", "mtp"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes of an engine.  ``buffer_bytes`` bounds the KV cache of each rank.

    ``max_requests`` run at the same time in a replica; None: ``overflow_factor`` times the number
    of longest sequences that the cache holds.  ``guaranteed_fraction`` of the pages is reserved for
    running requests when another one starts.  ``weights`` and ``batch_invariant`` are properties of
    the model too: see `use_fast_linears`.  ``draft_model``: what gives the ``num_draft_tokens``:
    earlier text, or the model's layers for multi-token prediction.
    """

    buffer_bytes: int = 2**30
    page_size: int | None = None  # tokens; None: 256 on a GPU, 16 on a CPU
    max_requests: int | None = None
    overflow_factor: float = 1.0
    guaranteed_fraction: float = 0.0
    max_step_tokens: int = 2048  # rows of one forward pass
    max_sequence_length: int | None = None  # default and maximum: the model's
    max_waiting: int = 1024
    has_prefix_cache: bool = True
    num_draft_tokens: int = 0
    draft_model: DraftKind = "ngram"
    weights: Literal["saved", "bf16", "int8"] = "saved"
    batch_invariant: bool = False
