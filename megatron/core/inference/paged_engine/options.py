"""Sizes of a generation engine, asked for and resolved.  No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.core.config.errors import ConfigError

DraftKind: TypeAlias = Literal["ngram", "mtp", "heads"]
KVFormat: TypeAlias = Literal["auto", "bf16", "int8"]

_BATCHING = "--inference-dynamic-batching"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes of an engine.  ``buffer_bytes`` bounds the KV cache of each rank.

    ``max_requests`` run at the same time in a replica; None: ``overflow_factor`` times the number
    of longest sequences that the cache holds.  ``guaranteed_fraction`` of the pages is reserved for
    running requests when another one starts.  ``weights`` and ``batch_invariant`` are properties of
    the model too: see `use_fast_linears`.  ``kv_cache``: format of keys and values in pages, "auto"
    is that of the model.  ``draft_model``: source of the ``num_draft_tokens``: earlier text, the
    model's layers for multi-token prediction, or its draft heads.  Raises ConfigError for a
    value that is out of range.
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
    kv_cache: KVFormat = "auto"
    num_cuda_graphs: int = 16  # numbers of requests whose decoding is captured; -1: all
    records_routes: bool = False  # of MoE models whose routers have a `RouterReplay`
    log_interval: int = 0  # steps between lines of the log; 0: none
    # Types of the convolution's last inputs and of the states of Mamba layers; None: as computed.
    state_dtypes: tuple[str | None, str | None] = (None, None)
    timeout_s: float = 600.0  # until a rank that does not answer ends the engine

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ConfigError("the engine cannot start:\n  - " + "\n  - ".join(problems))

    def problems(self) -> list[str]:
        """Return one sentence for each value that is out of range."""
        gigabytes = self.buffer_bytes / 2**30
        factor = self.overflow_factor
        fraction = self.guaranteed_fraction
        counts = {
            f"{_BATCHING}-chunk-size": (self.page_size, 1),
            f"--inference-max-requests (or {_BATCHING}-max-requests-override)": (
                self.max_requests,
                1,
            ),
            f"{_BATCHING}-max-tokens-override": (self.max_step_tokens, 1),
            "--inference-max-seq-length": (self.max_sequence_length, 1),
            "--inference-max-waiting-requests": (self.max_waiting, 1),
            "--inference-num-draft-tokens": (self.num_draft_tokens, 0),
            f"{_BATCHING}-num-cuda-graphs": (self.num_cuda_graphs, -1),
        }
        checks = [
            (gigabytes > 0, f"buffer-size-gb {gigabytes:g}", "a number above 0"),
            (0 < factor < math.inf, f"buffer-overflow-factor {factor}", "a number above 0"),
            (0 <= fraction <= 1, f"buffer-guaranteed-fraction {fraction}", "a number, 0 to 1"),
        ]
        return [f"{_BATCHING}-{shown}: give {what}" for fits, shown, what in checks if not fits] + [
            f"{flag} {value}: give {least} or more"
            for flag, (value, least) in counts.items()
            if value is not None and value < least
        ]

    def num_draft_layers(self, num_mtp_layers: int, num_heads: int, *, repeats: bool) -> int:
        """Return how many of a model's MTP layers or draft heads draft.

        ``repeats``: the last of them also drafts the tokens after its own.  Raises ConfigError if
        they should draft and cannot.
        """
        if self.draft_model == "ngram":
            return 0
        flag = f"--inference-draft-model {self.draft_model}"
        is_mtp = self.draft_model == "mtp"
        count = num_mtp_layers if is_mtp else num_heads
        if not count:
            lack = "layers for multi-token prediction" if is_mtp else "draft heads"
            trains = "--mtp-num-layers" if is_mtp else "--export-num-medusa-heads"
            raise ConfigError(
                f"{flag}: the model has no {lack}; train it with {trains}, or use "
                "--inference-draft-model ngram"
            )
        if not self.num_draft_tokens:
            raise ConfigError(
                f"{flag} has no effect with --inference-num-draft-tokens 0: ask for 1 draft token "
                "or more"
            )
        if self.num_draft_tokens > count and not repeats:
            raise ConfigError(
                f"--inference-num-draft-tokens {self.num_draft_tokens}: the model has {count} "
                f"Medusa heads, which draft one token each; give at most {count}"
            )
        return min(count, self.num_draft_tokens)


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine; a request holds one of ``max_requests`` slots while it runs."""

    page_size: int
    num_pages: int
    max_requests: int
    max_step_tokens: int
    max_sequence_length: int
    max_waiting: int
    has_prefix_cache: bool = True
    has_recurrent_layers: bool = False  # their state is not in pages: nothing can be shared
    keeps_images_whole: bool = False  # all rows of an image are computed in one step
    num_draft_tokens: int = 0
    num_draft_layers: int = 0  # layers that draft; 0: drafts come from earlier text
    num_reserved_pages: int = 0  # kept for requests that run: none starts with fewer free
