"""Learning rate and weight decay over the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay over the run."""

    start_weight_decay: float | None = option(
        None,
        "Weight decay at the start of the run, where it changes over time.",
        group="regularization",
    )
    end_weight_decay: float | None = option(
        None,
        "Weight decay at the end of the run, where it changes over time.",
        group="regularization",
    )
    weight_decay_incr_style: str = option(
        "constant",
        "How the weight decay goes from its start to its end.",
        group="regularization",
        choices=("constant", "linear", "cosine"),
    )
    lr_decay_style: str = option(
        "linear",
        "Shape of the learning rate after warm-up.",
        group="learning rate",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        "Shape of the last part of the WSD schedule.",
        group="learning rate",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_decay_iters: int | None = option(
        None,
        "Steps until the learning rate has fallen to --min-lr; --train-iters if not given.",
        group="learning rate",
    )
    lr_decay_samples: int | None = option(
        None,
        "Samples until the learning rate has fallen to --min-lr; --train-samples if not given.",
        group="learning rate",
    )
    lr_wsd_decay_samples: int | None = option(
        None,
        "Samples of the last part of the WSD schedule.",
        group="learning rate",
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "Steps of the last part of the WSD schedule.",
        group="learning rate",
    )
    lr_warmup_fraction: float | None = option(
        None,
        "Share of the decay length over which the learning rate rises, 0 to 1.",
        group="learning rate",
    )
    lr_warmup_iters: int = option(
        0,
        "Steps over which the learning rate rises to its peak.",
        group="learning rate",
    )
    lr_warmup_samples: int = option(
        0,
        "Samples over which the learning rate rises to its peak.",
        group="learning rate",
    )
    lr_warmup_init: float = option(
        0.0,
        "Learning rate at the start of warm-up.",
        group="learning rate",
    )
    override_opt_param_scheduler: bool = option(
        False,
        "Take the schedule from the command line where the checkpoint has another.",
        group="learning rate",
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "Take the schedule from the checkpoint where the command line has another.",
        group="learning rate",
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )
