"""Batch sizes, run length and how a run ends."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch sizes, run length and how a run ends."""

    micro_batch_size: int | None = option(
        None,
        "Samples in one forward pass of one model replica.",
        group="training",
    )
    global_batch_size: int | None = option(
        None,
        "Samples in one optimizer step over all replicas; one micro-batch a replica if not given.",
        group="training",
    )
    rehearse_memory: bool = option(
        False,
        "Before the first step, take the memory of the largest step and of an evaluation, so that "
        "too little is found out at once. Changes no number.",
        group="training",
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "START INCREMENT SAMPLES: begin with a global batch of START and grow it by "
        "INCREMENT until SAMPLES samples are consumed.",
        group="training",
        nargs="*",
    )
    decrease_batch_size_if_needed: bool = option(
        False,
        "Round a global batch that the replicas do not divide down instead of refusing it.",
        group="training",
    )
    iterations_to_skip: tuple[int, ...] = option(
        (),
        "Steps whose forward and backward pass are skipped; their data is consumed.",
        group="training",
        nargs="+",
    )
    empty_unused_memory_level: int = option(
        0,
        "Return cached GPU memory to the driver: 1 after each backward pass, 2 after each "
        "step too.",
        group="training",
        choices=(0, 1, 2),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        "Steps between comparisons of a hash of the weights over all replicas.",
        group="training",
    )
    train_sync_interval: int | None = option(
        None,
        "Steps between synchronisations of the host with the device.",
        group="training",
    )
    train_iters: int | None = option(
        None,
        "Optimizer steps of the run.",
        group="training",
    )
    train_samples: int | None = option(
        None,
        "Samples of the run; gives the number of steps instead of --train-iters.",
        group="training",
    )
    exit_interval: int | None = option(
        None,
        "Save and end when the step number is a multiple of this.",
        group="training",
    )
    exit_duration_in_mins: int | None = option(
        None,
        "Save and end after this many minutes.",
        group="training",
    )
    exit_signal_handler: bool = option(
        False,
        "On SIGTERM finish the step, save and end with status 0.",
        group="training",
    )
    manual_gc: bool = option(
        False,
        "Run Python's garbage collector only between steps, on all ranks at once.",
        group="training",
    )
    manual_gc_interval: int = option(
        0,
        "Steps between garbage collections with --manual-gc; 0 means never.",
        group="training",
    )
    manual_gc_eval: bool = option(
        True,
        "With --manual-gc, do not collect around evaluation.",
        group="training",
    )
    seed: int = option(
        1234,
        "Seed of weights, dropout and the order of samples; greater than 0.",
        group="initialization",
    )
    data_parallel_random_init: bool = option(
        False,
        "Give each replica other dropout; weights are equal on all replicas.",
        group="initialization",
    )
    enable_experimental: bool = option(
        False,
        "Allow the reference's experimental features.",
        group="experimental",
        ignored="nothing here waits for it",
    )
