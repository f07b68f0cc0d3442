"""When and on what the model is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """When and on what the model is evaluated."""

    full_validation: bool = option(False, "", group="validation")
    multiple_validation_sets: bool = option(False, "", group="validation")
    eval_iters: int = option(100, "", group="validation")
    eval_interval: int = option(1000, "", group="validation")
    skip_train: bool = option(False, "", group="validation")
