"""Flags for the schedules of learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron.core.config.option import INT64_MAX, option

_reg = partial(option, group="regularization")
_rate = partial(option, group="learning rate")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    start_weight_decay: float | None = _reg(
        None, "Initial weight decay; needs --weight-decay-incr-style linear or cosine."
    )
    end_weight_decay: float | None = _reg(
        None, "Final weight decay; needs --weight-decay-incr-style linear or cosine."
    )
    weight_decay_incr_style: str = _reg(
        "constant",
        "Schedule of the weight decay from --start-weight-decay to --end-weight-decay; "
        "constant uses --weight-decay.",
        choices=("constant", "linear", "cosine"),
    )
    head_lr_mult: float = option(
        1.0,
        "Learning rate multiplier of the output layer and of BERT's heads; needs "
        "--untie-embeddings-and-output-weights.",
        group="vision",
    )
    lr_decay_style: str = _rate(
        "linear",
        "Learning rate schedule after warmup.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = _rate(
        "exponential",
        "Learning rate schedule of the WSD decay phase.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_decay_iters: int | None = _rate(
        None,
        "Steps over which the learning rate decays to --min-lr; --train-iters if not given.",
        at_least=1,
    )
    lr_decay_samples: int | None = _rate(
        None,
        "Samples over which the learning rate decays to --min-lr; --train-samples if not given.",
        at_least=1,
        at_most=INT64_MAX,
    )
    lr_wsd_decay_samples: int | None = _rate(
        None, "Samples in the WSD decay phase.", at_least=1, at_most=INT64_MAX
    )
    lr_wsd_decay_iters: int | None = _rate(None, "Steps in the WSD decay phase.", at_least=1)
    lr_warmup_fraction: float | None = _rate(
        None,
        "Warmup length as a fraction of the decay length, 0 to 1; excludes --lr-warmup-iters "
        "and --lr-warmup-samples.",
    )
    lr_warmup_iters: int = _rate(0, "Linear warmup length in steps.")
    lr_warmup_samples: int = _rate(0, "Linear warmup length in samples.", at_most=INT64_MAX)
    lr_warmup_init: float = _rate(0.0, "Learning rate at the start of warmup.")
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
