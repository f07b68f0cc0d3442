"""Sizes that scripts give to a wrapper of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass
class InferenceWrapperConfig:
    """Sizes of generation.

    ``inference_max_requests`` run at the same time, each of up to ``inference_max_seq_length``
    tokens.  The other fields are taken from the model and the tokenizer, whatever they say.
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
        for name, value in attribute_value_pair.items():
            setattr(self, name, value)
