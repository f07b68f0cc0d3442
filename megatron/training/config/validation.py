"""Flags for evaluation: datasets, interval and length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import INT64_MAX, option

_validation = partial(option, group="validation")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    full_validation: bool = _validation(
        False, "Evaluate on the complete validation set instead of --eval-iters batches."
    )
    multiple_validation_sets: bool = _validation(
        False, "Evaluate separately on each validation data set; needs --full-validation."
    )
    eval_iters: int = _validation(100, "Batches per evaluation.")
    eval_interval: int = _validation(
        1000, "Steps between evaluations.", at_least=1, at_most=INT64_MAX
    )
    skip_train: bool = _validation(False, "Only evaluate, on the loaded weights.")
    eval_generate: str | None = _validation(
        None,
        "File of conversations or prompts (jsonl, parquet) that the model answers at each "
        "evaluation; rank 0 prints the answers.",
    )
    eval_generate_tokens: int = _validation(
        64, "Maximum number of tokens of an answer to --eval-generate.", at_least=1
    )
