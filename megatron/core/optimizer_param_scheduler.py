"""Schedules of learning rate and weight decay, as functions of the samples trained on.

All lengths ("steps") are in samples, so that a schedule does not depend on the batch size or its
ramp-up.  `OptimizerParamScheduler` writes the values into an optimizer's parameter groups.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypedDict

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
class LearningRateSchedule:
    """Linear warmup from ``init_lr``, then a decay from ``max_lr`` to ``min_lr``."""

    max_lr: float
    min_lr: float
    init_lr: float = 0.0
    warmup_steps: float = 0
    decay_steps: int
    style: str
    wsd_decay_steps: int | None = None  # length of the anneal phase of WSD
    wsd_style: str | None = "exponential"

    def __post_init__(self) -> None:
        ConfigError.raise_for(self._problems())

    def at(
        self, num_samples: int, max_lr: float | None = None, min_lr: float | None = None
    ) -> float:
        """Return the learning rate after ``num_samples``.

        ``max_lr`` and ``min_lr`` replace the schedule's (groups of --decoupled-lr have their own).
        """
        peak = self.max_lr if max_lr is None else max_lr
        floor = self.min_lr if min_lr is None else min_lr
        if self.warmup_steps > 0 and num_samples <= self.warmup_steps:
            return self.init_lr + (peak - self.init_lr) * num_samples / self.warmup_steps
        if self.style == "constant":
            return peak
        if num_samples > self.decay_steps:
            return floor
        if self.style == "inverse-square-root":
            scale = math.sqrt(max(self.warmup_steps, 1)) / math.sqrt(max(num_samples, 1))
            return max(floor, peak * scale)
        return floor + self._share_left(num_samples) * (peak - floor)

    def _share_left(self, num_samples: int) -> float:
        if self.style == "WSD":
            assert self.wsd_decay_steps is not None
            assert self.wsd_style is not None
            start = self.decay_steps - self.wsd_decay_steps
            if num_samples <= start:
                return 1.0
            return _WSD_CURVES[self.wsd_style]((num_samples - start) / self.wsd_decay_steps)
        done = (num_samples - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)

    def _problems(self) -> Iterator[str]:
        if self.style not in _DECAY_STYLES:
            yield f"--lr-decay-style {self.style} is none of {', '.join(_DECAY_STYLES)}"
        if not 0.0 <= self.min_lr <= self.max_lr:
            yield f"--min-lr {self.min_lr} must lie between 0 and --lr {self.max_lr}"
        if self.init_lr > self.max_lr:
            yield f"--lr-warmup-init {self.init_lr} must not exceed --lr {self.max_lr}"
        if self.decay_steps <= 0:
            yield (
                f"the learning rate decays over {self.decay_steps} samples, which must be more "
                f"than 0: see --lr-decay-iters, --lr-decay-samples and the length of the run"
            )
        elif self.warmup_steps >= self.decay_steps:
            yield (
                f"the warm-up of {self.warmup_steps} samples must end before the decay does, at "
                f"{self.decay_steps} samples: lower --lr-warmup-* or train longer"
            )
        if self.style != "WSD":
            return
        if self.wsd_decay_steps is None:
            yield "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples"
        elif not 0 < self.wsd_decay_steps <= self.decay_steps:
            yield (
                f"the WSD anneal phase of {self.wsd_decay_steps} samples must lie within the "
                f"decay of {self.decay_steps} samples"
            )
        if self.wsd_style not in _WSD_CURVES:
            yield f"--lr-wsd-decay-style {self.wsd_style} is none of {', '.join(_WSD_CURVES)}"


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay that goes from ``start`` to ``end`` over ``steps`` samples."""

    start: float
    end: float
    steps: int
    style: str = "constant"

    def __post_init__(self) -> None:
        ConfigError.raise_for(self._problems())

    def at(self, num_samples: int) -> float:
        """Return the weight decay after ``num_samples``."""
        if self.style == "constant" or num_samples > self.steps:
            return self.end
        done = num_samples / self.steps if self.steps else 1.0
        if self.style == "cosine":
            done = 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
        return self.start + done * (self.end - self.start)

    def _problems(self) -> Iterator[str]:
        if self.style not in _WD_STYLES:
            yield f"--weight-decay-incr-style {self.style} is none of {', '.join(_WD_STYLES)}"
        if not 0.0 <= self.start <= self.end:
            yield (
                f"weight decay must rise: 0 <= --start-weight-decay {self.start} "
                f"<= --end-weight-decay {self.end}"
            )
        elif self.style == "constant" and self.start != self.end:
            yield (
                f"--weight-decay-incr-style constant cannot go from {self.start} to {self.end}: "
                f"use linear or cosine"
            )


class SchedulerOptions(Protocol):
    """Flags that set the lengths of a schedule."""

    @property
    def lr_decay_iters(self) -> int | None: ...
    @property
    def lr_decay_samples(self) -> int | None: ...
    @property
    def lr_wsd_decay_iters(self) -> int | None: ...
    @property
    def lr_wsd_decay_samples(self) -> int | None: ...
    @property
    def lr_warmup_fraction(self) -> float | None: ...
    @property
    def lr_warmup_iters(self) -> int: ...
    @property
    def lr_warmup_samples(self) -> int: ...


class ScheduleLengths(NamedTuple):
    """Lengths in samples; a warmup that is a fraction of the decay need not be an integer."""

    warmup: float
    decay: int
    wsd_decay: int | None
    weight_decay_increase: int


def schedule_lengths(
    options: SchedulerOptions,
    *,
    train_iters: int | None,
    train_samples: int | None,
    global_batch_size: int,
) -> ScheduleLengths:
    """Convert lengths in iterations (of full batches), samples or fractions to samples.

    The run has ``train_samples`` samples, or ``train_iters`` iterations if that is None.  Raises
    ConfigError if both are None.
    """
    if train_samples is not None:
        length, unit = train_samples, 1
        decay, wsd = options.lr_decay_samples, options.lr_wsd_decay_samples
        warmup = options.lr_warmup_samples
    elif train_iters is not None:
        length, unit = train_iters, global_batch_size
        decay, wsd = options.lr_decay_iters, options.lr_wsd_decay_iters
        warmup = options.lr_warmup_iters
    else:
        raise ConfigError("the run has no length: give --train-iters or --train-samples")
    decay_samples = (length if decay is None else decay) * unit
    fraction = options.lr_warmup_fraction
    return ScheduleLengths(
        warmup=warmup * unit if fraction is None else fraction * decay_samples,
        decay=decay_samples,
        wsd_decay=None if wsd is None else wsd * unit,
        weight_decay_increase=length * unit,
    )


class ScheduledGroup(TypedDict, total=False):
    """Keys of a parameter group that the scheduler reads or writes."""

    lr: float
    weight_decay: float
    lr_mult: float
    wd_mult: float
    max_lr: float
    min_lr: float
    is_decoupled_lr: bool


class _Optimizer(Protocol):
    @property
    def param_groups(self) -> Sequence[ScheduledGroup]: ...


class _Field(NamedTuple):
    """Entry of the saved state: key, older keys, flag, and the attribute of which schedule."""

    key: str
    aliases: tuple[str, ...]
    flag: str
    schedule: str  # "lr" or "wd"
    attribute: str


_FIELDS = (
    _Field("max_lr", ("start_lr",), "--lr", "lr", "max_lr"),
    _Field("min_lr", (), "--min-lr", "lr", "min_lr"),
    _Field(
        "lr_warmup_steps",
        ("warmup_iter", "warmup_steps"),
        "samples of --lr-warmup-*",
        "lr",
        "warmup_steps",
    ),
    _Field(
        "lr_decay_steps",
        ("end_iter", "decay_steps"),
        "samples of --lr-decay-* (default: the length of the run)",
        "lr",
        "decay_steps",
    ),
    _Field("lr_decay_style", ("decay_style",), "--lr-decay-style", "lr", "style"),
    _Field("start_wd", (), "--start-weight-decay", "wd", "start"),
    _Field("end_wd", (), "--end-weight-decay", "wd", "end"),
    _Field(
        "wd_incr_steps",
        (),
        "samples of the weight decay increase (--train-iters or --train-samples)",
        "wd",
        "steps",
    ),
    _Field("wd_incr_style", (), "--weight-decay-incr-style", "wd", "style"),
)
_NUM_STEPS = ("num_steps", "num_iters")
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
        optimizer: _Optimizer,
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
        self.lr = LearningRateSchedule(
            max_lr=max_lr,
            min_lr=min_lr,
            init_lr=init_lr,
            warmup_steps=lr_warmup_steps,
            decay_steps=lr_decay_steps,
            style=lr_decay_style,
            wsd_decay_steps=wsd_decay_steps,
            wsd_style=lr_wsd_decay_style or "exponential",
        )
        self.wd = WeightDecaySchedule(
            start=start_wd, end=end_wd, steps=wd_incr_steps, style=wd_incr_style
        )
        self.use_checkpoint = use_checkpoint_opt_param_scheduler
        self.override = override_opt_param_scheduler
        self.num_steps = 0
        self.step(0)

    def learning_rate(self, num_samples: int) -> float:
        """Return the learning rate of groups without bounds of their own after ``num_samples``."""
        return self.lr.at(num_samples)

    def get_lr(self, param_group: ScheduledGroup) -> float:
        """Return the current learning rate of a group, without its ``lr_mult``."""
        return self.lr.at(self.num_steps, param_group.get("max_lr"), param_group.get("min_lr"))

    def get_wd(self) -> float:
        """Return the current weight decay, without a group's ``wd_mult``."""
        return self.wd.at(self.num_steps)

    def current_learning_rates(self) -> tuple[float, float | None]:
        """Return the current learning rates (ordinary groups, --decoupled-lr groups).

        The second is None if this rank has no group of --decoupled-lr.
        """
        groups = [g for g in self.optimizer.param_groups if g.get("is_decoupled_lr")]
        return self.lr.at(self.num_steps), self.get_lr(groups[0]) if groups else None

    def step(self, increment: int) -> None:
        """Advance by ``increment`` samples and write the new values."""
        self.num_steps += increment
        wd = self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = wd * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, float | str]:
        """Return the number of samples trained on and the values of both schedules."""
        return {**self._values(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, float | str]) -> None:
        """Restore a checkpoint's `state_dict`.

        If its schedule differs from this run's, ``override`` keeps the run's values and
        ``use_checkpoint`` those of the checkpoint.  With neither, raises CheckpointError, which
        lists every difference.  The length of a schedule that is constant in both is not compared.
        """
        changes = self._changes(state_dict)
        now = self._values()
        if changes and not self.override:
            if not self.use_checkpoint:
                raise CheckpointError(self._mismatch(changes))
            changed = [f for f in _FIELDS if f.key in changes]
            lr = {f.attribute: changes[f.key] for f in changed if f.schedule == "lr"}
            wd = {f.attribute: changes[f.key] for f in changed if f.schedule == "wd"}
            self.lr, self.wd = replace(self.lr, **lr), replace(self.wd, **wd)
        winner = "the run's" if self.override else "the checkpoint's"
        for field in _FIELDS:
            if field.key in changes:
                saved = changes[field.key]
                logger.info("%s: %s -> %s, kept %s", field.flag, saved, now[field.key], winner)
        self.num_steps = int(_first(state_dict, *_NUM_STEPS))
        self.step(0)

    def _changes(self, state_dict: Mapping[str, float | str]) -> dict[str, Any]:
        """Return the saved values that differ from this run's and that a schedule reads."""
        now = self._values()
        saved = {
            field.key: _first(state_dict, field.key, *field.aliases)
            # Older checkpoints did not save the weight decay.
            if field.schedule != "wd" or field.key in state_dict
            else None
            for field in _FIELDS
        }
        changes = {k: v for k, v in saved.items() if v is not None and v != now[k]}
        for length, style in _STYLES_OF_LENGTHS.items():
            if now[style] == saved[style] == "constant":
                changes.pop(length, None)
        return changes

    def _values(self) -> dict[str, float | str]:
        schedules = {"lr": vars(self.lr), "wd": vars(self.wd)}
        return {f.key: schedules[f.schedule][f.attribute] for f in _FIELDS}

    def _mismatch(self, changes: Mapping[str, object]) -> str:
        now = self._values()
        shown = "; ".join(
            f"{f.flag} {changes[f.key]} -> {now[f.key]}" for f in _FIELDS if f.key in changes
        )
        return (
            f"the schedule of the checkpoint is not this run's (checkpoint -> now): {shown}; "
            f"add --use-checkpoint-opt_param-scheduler to keep the checkpoint's or "
            f"--override-opt_param-scheduler to keep the command line's"
        )


def _first(state_dict: Mapping[str, float | str], *names: str) -> float | str:
    """Return the entry of the first of ``names`` that exists.  Raises CheckpointError if none."""
    for name in names:
        if name in state_dict:
            return state_dict[name]
    raise CheckpointError(f"the checkpoint's scheduler state has no entry {names[0]!r}")
