"""Flags of batch sizes, run length, evaluation, and code of the user."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import INT64_MAX, option

_training = partial(option, group="training")
_initialization = partial(option, group="initialization")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    micro_batch_size: int = _training(
        0, "Samples per forward pass on each data-parallel rank.", default=None, at_least=1
    )
    global_batch_size: int = _training(
        0,
        "Samples per optimizer step over all data-parallel ranks; one micro-batch per "
        "data-parallel rank if not given.",
        default=None,
        at_least=1,
    )
    rehearse_memory: bool = _training(
        False,
        "Allocate the memory of the largest step and of an evaluation before the first step, "
        "so that a run which does not fit stops at start-up. Does not change results.",
    )
    rampup_batch_size: tuple[int, ...] | None = _training(
        None,
        "START INCREMENT SAMPLES: increase the global batch size from START in steps of "
        "INCREMENT over SAMPLES samples.",
        nargs="*",
        at_most=INT64_MAX,
    )
    decrease_batch_size_if_needed: bool = _training(
        False,
        "Round the global batch size down to a multiple of micro-batch size x data-parallel "
        "size instead of refusing it.",
    )
    iterations_to_skip: tuple[int, ...] = _training(
        (), "Steps to skip: no forward and backward pass, but their data is consumed.", nargs="+"
    )
    empty_unused_memory_level: int = _training(
        0,
        "Release cached GPU memory: 0 never, 1 after each backward pass, 2 also after each "
        "optimizer step.",
        choices=(0, 1, 2),
    )
    check_weight_hash_across_dp_replicas_interval: int | None = _training(
        None,
        "Steps between checks that parameter hashes are equal on all data-parallel ranks.",
        at_least=1,
        at_most=INT64_MAX,
    )
    train_sync_interval: int | None = _training(
        None,
        "Steps between device synchronizations; 0 means never.",
        at_most=INT64_MAX,
    )
    train_iters: int | None = _training(None, "Number of training steps; excludes --train-samples.")
    train_samples: int | None = _training(
        None,
        "Number of training samples; excludes --train-iters.",
        at_most=INT64_MAX,
    )
    epochs: float | None = _training(
        None,
        "Passes over the training data of --sft, --dpo-beta or --reward-model; excludes "
        "--train-iters and --train-samples. The number of steps follows from the rows, after "
        "packing, and is rounded up.",
    )
    exit_interval: int | None = _training(
        None,
        "Save a checkpoint and exit when the step is a multiple of this; 0 means never.",
        at_most=INT64_MAX,
    )
    exit_duration_in_mins: int | None = _training(
        None, "Save a checkpoint and exit after this many minutes.", at_most=INT64_MAX
    )
    exit_signal_handler: bool = _training(
        False, "On SIGTERM finish the step, save a checkpoint and exit with status 0."
    )
    manual_gc: bool = _training(
        False,
        "Disable automatic garbage collection; all ranks collect at the same steps, every "
        "--manual-gc-interval.",
    )
    manual_gc_interval: int = _training(
        0, "Steps between garbage collections with --manual-gc; 0 means never.", at_most=INT64_MAX
    )
    manual_gc_eval: bool = _training(
        True, "With --manual-gc, do not collect before and after evaluation."
    )
    seed: int = _initialization(
        1234,
        "Random seed of weights, dropout and sample order, at least 1.",
        at_least=1,
        at_most=2**32 - 1,
    )
    data_parallel_random_init: bool = _initialization(
        False,
        "Use a different dropout seed on each data-parallel rank; weights are equal on all "
        "of them.",
    )


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
    best_metric: str | None = _validation(
        None,
        "Validation metric that --save-best and --early-stopping-patience compare, by its name in "
        "the log; the loss if not given. Lower is better for names with loss, higher for others.",
    )
    early_stopping_patience: int | None = _validation(
        None,
        "End training after this many evaluations in a row that do not improve the best "
        "--best-metric.",
        at_least=1,
    )
    early_stopping_min_delta: float = _validation(
        0.0,
        "Improvements of at most this count as none for --early-stopping-patience.",
        at_least=0,
    )
    eval_generate: str | None = _validation(
        None,
        "File of conversations or prompts (jsonl, parquet) that the model answers at each "
        "evaluation; rank 0 prints the answers.",
    )
    eval_generate_tokens: int = _validation(
        64, "Maximum number of tokens of an answer to --eval-generate.", at_least=1
    )


_extensions = partial(option, group="extensions", nargs="+", repeatable=True)


@dataclass(frozen=True, kw_only=True)
class ExtensionsConfig:
    import_module: tuple[str, ...] = _extensions(
        (),
        "Python modules to import at start, from PYTHONPATH or the working directory, that "
        "register model kinds, metrics, optimizers, tokenizers or datasets. May be given several "
        "times.",
    )
    callback: tuple[str, ...] = _extensions(
        (),
        "Callbacks to add after the built-in ones, each as MODULE:CLASS, a subclass of "
        "megatron.training.callbacks.Callback whose constructor needs no arguments. May be given "
        "several times.",
    )
