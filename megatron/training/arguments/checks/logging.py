"""Checks of logging and profiling."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig


def wandb_run_has_a_name(run: RunConfig) -> Iterator[str]:
    """Require a name for a W&B run, to find it again."""
    log = run.logging
    if log.wandb_project and not log.wandb_exp_name:
        yield f"--wandb-project {log.wandb_project} needs --wandb-exp-name"


def profile_has_steps(run: RunConfig) -> Iterator[str]:
    """Require at least one profiled step, on existing ranks."""
    p = run.profiling
    if p.profile and not 0 <= p.profile_step_start < p.profile_step_end:
        yield (
            f"--profile-step-start {p.profile_step_start} must be less than "
            f"--profile-step-end {p.profile_step_end}"
        )
    beyond = [rank for rank in p.profile_ranks if not 0 <= rank < run.world_size]
    if p.profile and beyond:
        ranks = " ".join(str(rank) for rank in beyond)
        yield f"--profile-ranks {ranks}: the run has ranks 0 to {run.world_size - 1}"


def trace_has_a_place(run: RunConfig) -> Iterator[str]:
    """Require a TensorBoard directory for the trace of the PyTorch profiler."""
    p = run.profiling
    if p.profile and p.use_pytorch_profiler and run.logging.tensorboard_dir is None:
        yield "--use-pytorch-profiler needs --tensorboard-dir, where the trace is written"
