"""Checks of training on pairs of answers (--dpo-beta, --reward-model)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.preference import SIGMOID
from megatron.training.config.run import DPO, REWARD, RunConfig


def one_objective(run: RunConfig) -> Iterator[str]:
    """Refuse flags of several objectives."""
    given = {
        "--sft": run.data.sft,
        "--dpo-beta": run.preference.dpo_beta is not None,
        "--reward-model": run.preference.reward_model,
        "--perform-rl-step": run.rl.perform_rl_step,
    }
    flags = [flag for flag, is_given in given.items() if is_given]
    if len(flags) > 1:
        yield f"{' and '.join(flags)}: a run has one objective: give one of them"


def preference_values(run: RunConfig) -> Iterator[str]:
    """Check the settings of the loss."""
    p = run.preference
    if p.dpo_beta is not None and not 0 < p.dpo_beta < float("inf"):
        yield f"--dpo-beta {p.dpo_beta}: give a number above 0, such as 0.1"
    smooth = p.dpo_label_smoothing
    if not 0 <= smooth < 0.5:
        yield f"--dpo-label-smoothing {smooth}: give a probability of at least 0 and below 0.5"
    elif smooth and p.dpo_loss_type != SIGMOID:
        yield (
            f"--dpo-label-smoothing {smooth} with --dpo-loss-type {p.dpo_loss_type}: only the loss "
            f"{SIGMOID} has label smoothing: leave one of the flags out"
        )


def models_of_pairs(run: RunConfig) -> Iterator[str]:
    """Refuse losses of single tokens beside a loss of pairs."""
    if run.objective in (DPO, REWARD) and run.model.mtp_num_layers is not None:
        yield (
            f"--mtp-num-layers {run.model.mtp_num_layers} with pairs of answers: multi-token "
            "prediction would learn the rejected answers too: leave it out"
        )
