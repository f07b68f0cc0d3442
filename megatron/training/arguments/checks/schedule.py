"""Checks of run length and learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.core.datasets.utils import get_blend_from_list
from megatron.training.config.run import OF_CONVERSATIONS, RunConfig


def length_has_one_unit(run: RunConfig) -> Iterator[str]:
    """Require one unit, steps or samples, for the run and its schedules."""
    t, s = run.training, run.scheduler
    by_samples = {
        "--train-samples": t.train_samples,
        "--lr-decay-samples": s.lr_decay_samples,
        "--lr-warmup-samples": s.lr_warmup_samples or None,
        "--lr-wsd-decay-samples": s.lr_wsd_decay_samples,
        "--rampup-batch-size": t.rampup_batch_size,
    }
    by_steps = {
        "--lr-decay-iters": s.lr_decay_iters,
        "--lr-warmup-iters": s.lr_warmup_iters or None,
        "--lr-wsd-decay-iters": s.lr_wsd_decay_iters,
    }
    if t.train_iters is not None or t.epochs is not None:
        length = "--train-iters counts steps" if t.epochs is None else "--epochs becomes steps"
        for flag in (f for f, value in by_samples.items() if value is not None):
            yield f"{flag} counts samples and {length}: use one unit for all"
    elif t.train_samples is not None:
        for flag in (f for f, value in by_steps.items() if value is not None):
            yield f"{flag} counts steps and --train-samples counts samples: use one unit for all"


def epochs_are_of_one_data_set(run: RunConfig) -> Iterator[str]:
    """Require that --epochs alone sets the length, and that one path has the training data."""
    t = run.training
    d = run.data
    if t.epochs is None:
        return
    if run.objective not in OF_CONVERSATIONS:
        yield (
            f"--epochs {t.epochs:g} is for --sft, --dpo-beta and --reward-model, whose data has "
            "rows to count: give --train-iters"
        )
    if not 0 < t.epochs < math.inf:
        yield f"--epochs {t.epochs:g}: give a number above 0"
    if t.train_iters is not None:
        yield f"--epochs {t.epochs:g} and --train-iters {t.train_iters} set the length: keep one"
    for flag, words in (("--data-path", d.data_path), ("--train-data-path", d.train_data_path)):
        blend = get_blend_from_list(words)
        if blend is not None and len(blend[0]) > 1:
            yield (
                f"--epochs {t.epochs:g} with several paths in {flag}: an epoch of a mixture has no "
                "length; give one folder with all files, or --train-iters"
            )
    for flag, path in (
        ("--data-args-path", d.data_args_path),
        ("--per-split-data-args-path", d.per_split_data_args_path),
    ):
        if path is not None:
            yield f"--epochs {t.epochs:g} with {flag}: name the data with --train-data-path"


def warmup_is_said_once(run: RunConfig) -> Iterator[str]:
    """Refuse a warmup given both as a fraction and as a number."""
    s = run.scheduler
    if s.lr_warmup_fraction is None:
        return
    if not 0 <= s.lr_warmup_fraction < 1:
        yield f"--lr-warmup-fraction {s.lr_warmup_fraction}: from 0 up to 1 is needed"
    for flag, value in (
        ("--lr-warmup-iters", s.lr_warmup_iters),
        ("--lr-warmup-samples", s.lr_warmup_samples),
    ):
        if value:
            yield f"--lr-warmup-fraction and {flag} {value} both set the warmup: keep one"


def warmup_ends_before_decay(run: RunConfig) -> Iterator[str]:
    """Require a warmup that is shorter than the decay."""
    t, s = run.training, run.scheduler
    for unit, warmup, decay, length in (
        ("iters", s.lr_warmup_iters, s.lr_decay_iters, t.train_iters),
        ("samples", s.lr_warmup_samples, s.lr_decay_samples, t.train_samples),
    ):
        end = decay if decay is not None else length
        if end == 0 and not run.validation.skip_train:
            yield (
                f"--train-{unit} 0 leaves nothing for the learning rate to follow: use --skip-train"
            )
        if end is not None and warmup >= end > 0:
            flag = f"--lr-decay-{unit}" if decay is not None else f"--train-{unit}"
            yield (
                f"--lr-warmup-{unit} {warmup} is not less than {flag} {end}: shorten the warm-up"
            )


def wsd_has_a_last_part(run: RunConfig) -> Iterator[str]:
    """Require a decay length for WSD, in the unit of the run, at most the run length."""
    t, s = run.training, run.scheduler
    if s.lr_decay_style != "WSD":
        return
    unit = "samples" if t.train_samples is not None else "iters"
    part, decay, length = (
        (s.lr_wsd_decay_samples, s.lr_decay_samples, t.train_samples)
        if unit == "samples"
        else (s.lr_wsd_decay_iters, s.lr_decay_iters, t.train_iters)
    )
    end = decay if decay is not None else length
    if part is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
    elif end is not None and part > end:
        yield f"--lr-wsd-decay-{unit} {part} is longer than the {end} {unit} of the schedule"


def one_source_of_the_schedule(run: RunConfig) -> Iterator[str]:
    """Refuse to take the schedule from both command line and checkpoint."""
    s = run.scheduler
    if s.override_opt_param_scheduler and s.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude "
            "each other: keep the first for the values of the command line, the second for those "
            "of "
            "the checkpoint"
        )
