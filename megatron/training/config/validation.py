"""When and on what the model is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """When and on what the model is evaluated."""

    full_validation: bool = option(
        False,
        "Go through the whole validation set at each evaluation.",
        group="validation",
    )
    multiple_validation_sets: bool = option(
        False,
        "Evaluate on each data set of --valid-data-path or the blend apart.",
        group="validation",
    )
    eval_iters: int = option(
        100,
        "Batches of an evaluation.",
        group="validation",
    )
    eval_interval: int = option(
        1000,
        "Steps between evaluations.",
        group="validation",
    )
    skip_train: bool = option(
        False,
        "Only evaluate, on the loaded weights.",
        group="validation",
    )
