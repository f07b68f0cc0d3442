"""Derive run length, learning rate and weight decay schedules from the configuration."""

from __future__ import annotations

from megatron.core.config.errors import ConfigError
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, schedule_lengths
from megatron.training.config.run import RunConfig
from megatron.training.process.rank_print import print_rank_0
from megatron.training.runtime.context import RunContext


def number_of_train_iters(config: RunConfig, batches: NumMicroBatchesCalculator) -> int:
    """Return the number of steps; a sample-based run drops its last partial batch."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    if config.training.train_samples is None:
        return 0
    iters = batches.train_iters(config.training.train_samples)
    print_rank_0(f"setting training iterations to {iters}")
    return iters


def recount_train_iters(run: RunContext) -> None:
    """Recompute ``run.train_iters`` after loading, so that a resumed run reads all its samples.

    The number of remaining steps differs if the batch size has changed since the checkpoint.
    """
    samples, state = run.config.training.train_samples, run.state
    if run.config.training.train_iters is None and samples is not None:
        left = run.batches.train_iters(samples, state.consumed_train_samples)
        run.train_iters = state.iteration + left
    elif run.samples_of_epochs is not None:
        unread = max(0, run.samples_of_epochs - state.consumed_train_samples)
        run.train_iters = state.iteration + -(-unread // run.batches.full_global_batch_size)


def build_scheduler(run: RunContext, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return the learning rate and weight decay scheduler of ``optimizer``.

    Raise ConfigError without --lr.
    """
    asked = run.config.optimizer
    scheduler = run.config.scheduler
    if asked.lr is None:
        raise ConfigError("--lr is missing: give the peak learning rate")
    lengths = schedule_lengths(
        scheduler,
        train_iters=run.config.training.train_iters,
        train_samples=run.config.training.train_samples,
        global_batch_size=run.batches.global_batch_size_wanted,
    )
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler.lr_warmup_init,
        max_lr=asked.lr,
        min_lr=asked.min_lr or 0.0,
        lr_warmup_steps=lengths.warmup,
        lr_decay_steps=lengths.decay,
        lr_decay_style=scheduler.lr_decay_style,
        start_wd=asked.weight_decay if start is None else start,
        end_wd=asked.weight_decay if end is None else end,
        wd_incr_steps=lengths.weight_decay_increase,
        wd_incr_style=scheduler.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=scheduler.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=scheduler.override_opt_param_scheduler,
        wsd_decay_steps=lengths.wsd_decay,
        lr_wsd_decay_style=scheduler.lr_wsd_decay_style,
    )
