"""Schedules of learning rate and weight decay, as functions of the samples trained on.

All lengths ("steps") are in samples, so that a schedule does not depend on the batch size or its
ramp-up.  `OptimizerParamScheduler` writes the values into an optimizer's parameter groups.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from megatron.core.config.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

# Fraction of (max - min) that is left after a fraction r of the anneal phase.
_WSD_CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}
_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_WD_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and weight decay, with the names of Megatron-LM's saved state.

    The learning rate warms up linearly from ``init_lr``, then decays from ``max_lr`` to ``min_lr``.
    Weight decay goes from ``start_wd`` to ``end_wd`` over ``wd_incr_steps`` samples.
    """

    max_lr: float
    min_lr: float
    init_lr: float = 0.0
    lr_warmup_steps: float = 0
    lr_decay_steps: int
    lr_decay_style: str
    wsd_decay_steps: int | None = None  # length of the anneal phase of WSD
    lr_wsd_decay_style: str = "exponential"
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str = "constant"

    def __post_init__(self) -> None:
        ConfigError.raise_for(self._problems())

    def lr(
        self, num_samples: int, max_lr: float | None = None, min_lr: float | None = None
    ) -> float:
        """Return the learning rate after ``num_samples``.

        ``max_lr`` and ``min_lr`` replace the schedule's (groups of --decoupled-lr have their own).
        """
        peak = self.max_lr if max_lr is None else max_lr
        floor = self.min_lr if min_lr is None else min_lr
        warmup = self.lr_warmup_steps
        style = self.lr_decay_style
        if warmup > 0 and num_samples <= warmup:
            return self.init_lr + (peak - self.init_lr) * num_samples / warmup
        if style == "constant":
            return peak
        if num_samples > self.lr_decay_steps:
            return floor
        if style == "inverse-square-root":
            scale = math.sqrt(max(warmup, 1)) / math.sqrt(max(num_samples, 1))
            return max(floor, peak * scale)
        if style == "WSD":
            assert self.wsd_decay_steps is not None
            start = self.lr_decay_steps - self.wsd_decay_steps
            curve = self.lr_wsd_decay_style
            done = (num_samples - start) / self.wsd_decay_steps
            left = 1.0 if num_samples <= start else _WSD_CURVES[curve](done)
        else:
            left = _WSD_CURVES[style]((num_samples - warmup) / (self.lr_decay_steps - warmup))
        return floor + left * (peak - floor)

    def wd(self, num_samples: int) -> float:
        """Return the weight decay after ``num_samples``."""
        if self.wd_incr_style == "constant" or num_samples > self.wd_incr_steps:
            return self.end_wd
        done = num_samples / self.wd_incr_steps if self.wd_incr_steps else 1.0
        if self.wd_incr_style == "cosine":
            done = 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
        return self.start_wd + done * (self.end_wd - self.start_wd)

    def _problems(self) -> Iterator[str]:
        if self.lr_decay_style not in _DECAY_STYLES:
            yield f"--lr-decay-style {self.lr_decay_style} is none of {', '.join(_DECAY_STYLES)}"
        if not 0.0 <= self.min_lr <= self.max_lr:
            yield f"--min-lr {self.min_lr} must lie between 0 and --lr {self.max_lr}"
        if self.init_lr > self.max_lr:
            yield f"--lr-warmup-init {self.init_lr} must not exceed --lr {self.max_lr}"
        if self.lr_decay_steps <= 0:
            yield (
                f"the learning rate decays over {self.lr_decay_steps} samples, which must be more "
                f"than 0: see --lr-decay-iters, --lr-decay-samples and the length of the run"
            )
        elif self.lr_warmup_steps >= self.lr_decay_steps:
            yield (
                f"the warm-up of {self.lr_warmup_steps} samples must end before the decay does, at "
                f"{self.lr_decay_steps} samples: lower --lr-warmup-* or train longer"
            )
        if self.lr_decay_style == "WSD":
            if self.wsd_decay_steps is None:
                yield "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            elif not 0 < self.wsd_decay_steps <= self.lr_decay_steps:
                yield (
                    f"the WSD anneal phase of {self.wsd_decay_steps} samples must lie within the "
                    f"decay of {self.lr_decay_steps} samples"
                )
            if self.lr_wsd_decay_style not in _WSD_CURVES:
                known = ", ".join(_WSD_CURVES)
                yield f"--lr-wsd-decay-style {self.lr_wsd_decay_style} is none of {known}"
        if self.wd_incr_style not in _WD_STYLES:
            known = ", ".join(_WD_STYLES)
            yield f"--weight-decay-incr-style {self.wd_incr_style} is none of {known}"
        if not 0.0 <= self.start_wd <= self.end_wd:
            yield (
                f"weight decay must rise: 0 <= --start-weight-decay {self.start_wd} "
                f"<= --end-weight-decay {self.end_wd}"
            )
        elif self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            yield (
                f"--weight-decay-incr-style constant cannot go from {self.start_wd} to "
                f"{self.end_wd}: use linear or cosine"
            )


def schedule_lengths(
    options: Any, *, train_iters: int | None, train_samples: int | None, global_batch_size: int
) -> dict[str, Any]:
    """Convert lengths in iterations (of full batches), samples or fractions to samples.

    ``options``: the flags (`SchedulerConfig`).  Returns arguments of `OptimizerParamScheduler`; a
    warmup that is a fraction of the decay need not be an integer.  The run has ``train_samples``
    samples, or ``train_iters`` iterations if that is None.  Raises ConfigError if both are None.
    """
    if train_samples is not None:
        length = train_samples
        unit = 1
        decay = options.lr_decay_samples
        wsd = options.lr_wsd_decay_samples
        warmup = options.lr_warmup_samples
    elif train_iters is not None:
        length = train_iters
        unit = global_batch_size
        decay = options.lr_decay_iters
        wsd = options.lr_wsd_decay_iters
        warmup = options.lr_warmup_iters
    else:
        raise ConfigError("the run has no length: give --train-iters or --train-samples")
    decay_samples = (length if decay is None else decay) * unit
    fraction = options.lr_warmup_fraction
    return {
        "lr_warmup_steps": warmup * unit if fraction is None else fraction * decay_samples,
        "lr_decay_steps": decay_samples,
        "wsd_decay_steps": None if wsd is None else wsd * unit,
        "wd_incr_steps": length * unit,
    }


class ScheduledGroup(TypedDict, total=False):
    """Keys of a parameter group that the scheduler reads or writes."""

    lr: float
    weight_decay: float
    lr_mult: float
    wd_mult: float
    max_lr: float
    min_lr: float
    is_decoupled_lr: bool


# Saved value, a field of `Schedule` -> (its flag, keys of older checkpoints).
_SAVED: dict[str, tuple[str, tuple[str, ...]]] = {
    "max_lr": ("--lr", ("start_lr",)),
    "min_lr": ("--min-lr", ()),
    "lr_warmup_steps": ("samples of --lr-warmup-*", ("warmup_iter", "warmup_steps")),
    "lr_decay_steps": (
        "samples of --lr-decay-* (default: the length of the run)",
        ("end_iter", "decay_steps"),
    ),
    "lr_decay_style": ("--lr-decay-style", ("decay_style",)),
    "start_wd": ("--start-weight-decay", ()),
    "end_wd": ("--end-weight-decay", ()),
    "wd_incr_steps": (
        "samples of the weight decay increase (--train-iters or --train-samples)",
        (),
    ),
    "wd_incr_style": ("--weight-decay-incr-style", ()),
}
# Key of a length -> key of its style.  A schedule whose style is constant does not read its length,
# which by default is that of the run: a longer run may continue it.
_STYLES_OF_LENGTHS = {"lr_decay_steps": "lr_decay_style", "wd_incr_steps": "wd_incr_style"}


class OptimizerParamScheduler:
    """Scheduler that writes learning rate and weight decay into ``optimizer.param_groups``.

    The values of a group are multiplied by its ``lr_mult`` and ``wd_mult``; a group with ``max_lr``
    and ``min_lr`` has these as the bounds of its learning rate.
    """

    def __init__(
        self,
        optimizer: Any,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: int,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: int,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: int | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        if override_opt_param_scheduler and use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude "
                "each other: give one of them"
            )
        self.optimizer = optimizer
        self.schedule = Schedule(
            init_lr=init_lr,
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_steps,
            lr_decay_steps=lr_decay_steps,
            lr_decay_style=lr_decay_style,
            wsd_decay_steps=wsd_decay_steps,
            lr_wsd_decay_style=lr_wsd_decay_style or "exponential",
            start_wd=start_wd,
            end_wd=end_wd,
            wd_incr_steps=wd_incr_steps,
            wd_incr_style=wd_incr_style,
        )
        self.use_checkpoint = use_checkpoint_opt_param_scheduler
        self.override = override_opt_param_scheduler
        self.num_steps = 0
        self.step(0)

    def get_lr(self, param_group: ScheduledGroup) -> float:
        """Return the current learning rate of a group, without its ``lr_mult``."""
        bounds = param_group.get("max_lr"), param_group.get("min_lr")
        return self.schedule.lr(self.num_steps, *bounds)

    def get_wd(self) -> float:
        """Return the current weight decay, without a group's ``wd_mult``."""
        return self.schedule.wd(self.num_steps)

    def current_learning_rates(self) -> tuple[float, float | None]:
        """Return the current learning rates (ordinary groups, --decoupled-lr groups).

        The second is None if this rank has no group of --decoupled-lr.
        """
        groups = [g for g in self.optimizer.param_groups if g.get("is_decoupled_lr")]
        return self.get_lr({}), self.get_lr(groups[0]) if groups else None

    def step(self, increment: int) -> None:
        """Advance by ``increment`` samples and write the new values."""
        self.num_steps += increment
        wd = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = wd * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, float | str]:
        """Return the number of samples trained on and the values of the schedule."""
        return {**{key: getattr(self.schedule, key) for key in _SAVED}, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, float | str]) -> None:
        """Restore a checkpoint's `state_dict`.

        If its schedule differs from this run's, ``override`` keeps the run's values and
        ``use_checkpoint`` those of the checkpoint.  With neither, raises CheckpointError, which
        lists every difference.  The length of a schedule that is constant in both is not compared.
        """
        now = self.state_dict()
        saved = {
            key: _first(state_dict, key, *older)
            for key, (_, older) in _SAVED.items()
            # Older checkpoints did not save the weight decay.
            if "wd" not in key or key in state_dict
        }
        changes: dict[str, Any] = {k: v for k, v in saved.items() if v not in (None, now[k])}
        for length, style in _STYLES_OF_LENGTHS.items():
            if now[style] == saved.get(style) == "constant":
                changes.pop(length, None)
        shown = {_SAVED[key][0]: f"{old} -> {now[key]}" for key, old in changes.items()}
        if changes and not self.override:
            if not self.use_checkpoint:
                listed = "; ".join(f"{flag} {change}" for flag, change in shown.items())
                raise CheckpointError(
                    "the schedule of the checkpoint is not this run's (checkpoint -> now): "
                    f"{listed}; add --use-checkpoint-opt_param-scheduler to keep the checkpoint's "
                    "or --override-opt_param-scheduler to keep the command line's"
                )
            self.schedule = replace(self.schedule, **changes)
        winner = "the run's" if self.override else "the checkpoint's"
        for flag, change in shown.items():
            logger.info("%s: %s, kept %s", flag, change, winner)
        self.num_steps = int(_first(state_dict, "num_steps", "num_iters"))
        self.step(0)


def _first(state_dict: Mapping[str, float | str], *names: str) -> float | str:
    """Return the entry of the first of ``names`` that exists.  Raises CheckpointError if none."""
    for name in names:
        if name in state_dict:
            return state_dict[name]
    raise CheckpointError(f"the checkpoint's scheduler state has no entry {names[0]!r}")
