"""Rules about reports and profiles."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.run import RunConfig


def wandb_run_has_a_name(run: RunConfig) -> Iterator[str]:
    """A run without a name cannot be found again."""
    log = run.logging
    if log.wandb_project and not log.wandb_exp_name:
        yield f"--wandb-project {log.wandb_project} needs --wandb-exp-name"


def profile_has_steps(run: RunConfig) -> Iterator[str]:
    """Profiling ends after it began, on ranks that exist."""
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
    """A PyTorch trace is written for TensorBoard."""
    p = run.profiling
    if p.profile and p.use_pytorch_profiler and run.logging.tensorboard_dir is None:
        yield "--use-pytorch-profiler needs --tensorboard-dir, where the trace is written"
