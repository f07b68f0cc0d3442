"""Learning rate and weight decay over the run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.option import option


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay over the run."""

    start_weight_decay: float | None = option(None, "", group="regularization")
    end_weight_decay: float | None = option(None, "", group="regularization")
    weight_decay_incr_style: str = option(
        "constant",
        "",
        group="regularization",
        choices=("constant", "linear", "cosine"),
    )
    lr_decay_style: str = option(
        "linear",
        "",
        group="learning rate",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        "",
        group="learning rate",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_decay_iters: int | None = option(None, "", group="learning rate")
    lr_decay_samples: int | None = option(None, "", group="learning rate")
    lr_wsd_decay_samples: int | None = option(None, "", group="learning rate")
    lr_wsd_decay_iters: int | None = option(None, "", group="learning rate")
    lr_warmup_fraction: float | None = option(None, "", group="learning rate")
    lr_warmup_iters: int = option(0, "", group="learning rate")
    lr_warmup_samples: int = option(0, "", group="learning rate")
    lr_warmup_init: float = option(0.0, "", group="learning rate")
    override_opt_param_scheduler: bool = option(
        False,
        "",
        group="learning rate",
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "",
        group="learning rate",
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )
