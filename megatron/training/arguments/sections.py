"""Which configs have flags, and where their values live in a RunConfig."""

from __future__ import annotations

from functools import cache
from typing import Any

from megatron.core.config.option import dest_of, flag_of, options_of
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments.options import namespace_default
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.distributed import DistributedConfig
from megatron.training.config.inference import InferenceConfig
from megatron.training.config.language_model import LanguageModelConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.out_of_scope import OutOfScopeFlags
from megatron.training.config.profiling import ProfilingConfig
from megatron.training.config.resilience import ResilienceConfig
from megatron.training.config.scheduler import SchedulerConfig
from megatron.training.config.shorthand import ShorthandFlags
from megatron.training.config.tokenizer import TokenizerConfig
from megatron.training.config.training import TrainingConfig
from megatron.training.config.validation import ValidationConfig

# attribute of RunConfig -> its class
SECTIONS: dict[str, type] = {
    "model": TransformerConfig,
    "language_model": LanguageModelConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "ddp": DistributedDataParallelConfig,
    "distributed": DistributedConfig,
    "training": TrainingConfig,
    "validation": ValidationConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "profiling": ProfilingConfig,
    "resilience": ResilienceConfig,
    "inference": InferenceConfig,
}

# Flags that `resolve` reads and nobody after it.
FLAGS_ONLY: tuple[type, ...] = (ShorthandFlags, OutOfScopeFlags)

ALL_CLASSES: tuple[type, ...] = (*SECTIONS.values(), *FLAGS_ONLY)


@cache
def flags_and_defaults() -> dict[str, tuple[str, Any]]:
    """dest -> flag and value when it is not given."""
    return {
        dest_of(f, opt): (flag_of(f, opt), namespace_default(f, opt))
        for cls in ALL_CLASSES
        for f, opt in options_of(cls)
    }
