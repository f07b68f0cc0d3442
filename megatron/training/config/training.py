"""Batch sizes, run length and how a run ends."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch sizes, run length and how a run ends."""

    micro_batch_size: int | None = option(None, "", group="training")
    global_batch_size: int | None = option(None, "", group="training")
    rampup_batch_size: tuple[int, ...] | None = option(None, "", group="training", nargs="*")
    decrease_batch_size_if_needed: bool = option(False, "", group="training")
    iterations_to_skip: tuple[int, ...] = option((), "", group="training", nargs="+")
    empty_unused_memory_level: int = option(0, "", group="training", choices=(0, 1, 2))
    check_weight_hash_across_dp_replicas_interval: int | None = option(None, "", group="training")
    train_sync_interval: int | None = option(None, "", group="training")
    train_iters: int | None = option(None, "", group="training")
    train_samples: int | None = option(None, "", group="training")
    exit_interval: int | None = option(None, "", group="training")
    exit_duration_in_mins: int | None = option(None, "", group="training")
    exit_signal_handler: bool = option(False, "", group="training")
    manual_gc: bool = option(False, "", group="training")
    manual_gc_interval: int = option(0, "", group="training")
    manual_gc_eval: bool = option(True, "", group="training")
    seed: int = option(1234, "", group="initialization")
    data_parallel_random_init: bool = option(False, "", group="initialization")
    moe_use_upcycling: bool = option(False, "", group="moe")
    moe_upcycling_granularity: int = option(1, "", group="moe")
    enable_experimental: bool = option(False, "", group="experimental")
