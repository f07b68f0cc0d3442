"""Batch sizes, run length and how a run ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import INT64_MAX, option

_training = partial(option, group="training")
_initialization = partial(option, group="initialization")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    micro_batch_size: int | None = _training(
        None, "Samples in one forward pass of one model replica.", at_least=1
    )
    global_batch_size: int | None = _training(
        None,
        "Samples in one optimizer step over all replicas; one micro-batch a replica if not given.",
        at_least=1,
    )
    rehearse_memory: bool = _training(
        False,
        "Before the first step, take the memory of the largest step and of an evaluation, so that "
        "too little is found out at once. Changes no number.",
    )
    rampup_batch_size: tuple[int, ...] | None = _training(
        None,
        "START INCREMENT SAMPLES: begin with a global batch of START and grow it by "
        "INCREMENT until SAMPLES samples are consumed.",
        nargs="*",
        at_most=INT64_MAX,
    )
    decrease_batch_size_if_needed: bool = _training(
        False, "Round a global batch that the replicas do not divide down instead of refusing it."
    )
    iterations_to_skip: tuple[int, ...] = _training(
        (), "Steps whose forward and backward pass are skipped; their data is consumed.", nargs="+"
    )
    empty_unused_memory_level: int = _training(
        0,
        "Return cached GPU memory to the driver: 1 after each backward pass, 2 after each "
        "step too.",
        choices=(0, 1, 2),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = _training(
        None,
        "Steps between comparisons of a hash of the weights over all replicas.",
        at_least=1,
        at_most=INT64_MAX,
    )
    train_sync_interval: int | None = _training(
        None,
        "Steps between synchronisations of the host with the device; 0 means never.",
        at_most=INT64_MAX,
    )
    train_iters: int | None = _training(None, "Optimizer steps of the run.")
    train_samples: int | None = _training(
        None,
        "Samples of the run; gives the number of steps instead of --train-iters.",
        at_most=INT64_MAX,
    )
    exit_interval: int | None = _training(
        None,
        "Save and end when the step number is a multiple of this; 0 means never.",
        at_most=INT64_MAX,
    )
    exit_duration_in_mins: int | None = _training(
        None, "Save and end after this many minutes.", at_most=INT64_MAX
    )
    exit_signal_handler: bool = _training(
        False, "On SIGTERM finish the step, save and end with status 0."
    )
    manual_gc: bool = _training(
        False, "Run Python's garbage collector only between steps, on all ranks at once."
    )
    manual_gc_interval: int = _training(
        0, "Steps between garbage collections with --manual-gc; 0 means never.", at_most=INT64_MAX
    )
    manual_gc_eval: bool = _training(True, "With --manual-gc, do not collect around evaluation.")
    seed: int = _initialization(
        1234,
        "Seed of weights, dropout and the order of samples; greater than 0.",
        at_least=1,
        at_most=2**32 - 1,
    )
    data_parallel_random_init: bool = _initialization(
        False, "Give each replica other dropout; weights are equal on all replicas."
    )
    enable_experimental: bool = option(
        False,
        "Allow the reference's experimental features.",
        group="experimental",
        ignored="nothing here waits for it",
    )
