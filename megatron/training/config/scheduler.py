"""Learning rate and weight decay over the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import INT64_MAX, option

_reg = partial(option, group="regularization")
_rate = partial(option, group="learning rate")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    start_weight_decay: float | None = _reg(
        None, "Weight decay at the start of the run, where it changes over time."
    )
    end_weight_decay: float | None = _reg(
        None, "Weight decay at the end of the run, where it changes over time."
    )
    weight_decay_incr_style: str = _reg(
        "constant",
        "How the weight decay goes from its start to its end.",
        choices=("constant", "linear", "cosine"),
    )
    head_lr_mult: float = option(
        1.0,
        "Factor on the learning rate of the output layer and of BERT's heads.  Needs "
        "--untie-embeddings-and-output-weights.",
        group="vision",
    )
    lr_decay_style: str = _rate(
        "linear",
        "Shape of the learning rate after warm-up.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = _rate(
        "exponential",
        "Shape of the last part of the WSD schedule.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_decay_iters: int | None = _rate(
        None,
        "Steps until the learning rate has fallen to --min-lr; --train-iters if not given.",
        at_least=1,
    )
    lr_decay_samples: int | None = _rate(
        None,
        "Samples until the learning rate has fallen to --min-lr; --train-samples if not given.",
        at_least=1,
        at_most=INT64_MAX,
    )
    lr_wsd_decay_samples: int | None = _rate(
        None, "Samples of the last part of the WSD schedule.", at_least=1, at_most=INT64_MAX
    )
    lr_wsd_decay_iters: int | None = _rate(
        None, "Steps of the last part of the WSD schedule.", at_least=1
    )
    lr_warmup_fraction: float | None = _rate(
        None, "Share of the decay length over which the learning rate rises, 0 to 1."
    )
    lr_warmup_iters: int = _rate(0, "Steps over which the learning rate rises to its peak.")
    lr_warmup_samples: int = _rate(
        0, "Samples over which the learning rate rises to its peak.", at_most=INT64_MAX
    )
    lr_warmup_init: float = _rate(0.0, "Learning rate at the start of warm-up.")
    override_opt_param_scheduler: bool = _rate(
        False,
        "Take the schedule from the command line where the checkpoint has another.",
        flag="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = _rate(
        False,
        "Take the schedule from the checkpoint where the command line has another.",
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )
