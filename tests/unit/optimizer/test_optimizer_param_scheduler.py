"""Learning rate and weight decay over samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    Schedule,
    schedule_lengths,
)

PEAK, FLOOR = 1.0, 0.1


def schedule(style: str, **more: Any) -> Schedule:
    values = {"max_lr": PEAK, "min_lr": FLOOR, "lr_warmup_steps": 100, "lr_decay_steps": 1100}
    values |= {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1100}
    return Schedule(**{**values, "lr_decay_style": style, **more})


def scheduler(groups: list[dict] | None = None, **more: Any) -> OptimizerParamScheduler:
    values: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": PEAK,
        "min_lr": FLOOR,
        "lr_warmup_steps": 100,
        "lr_decay_steps": 1100,
        "lr_decay_style": "linear",
        "start_wd": 0.01,
        "end_wd": 0.1,
        "wd_incr_steps": 1000,
        "wd_incr_style": "linear",
        "use_checkpoint_opt_param_scheduler": False,
    }
    optimizer = SimpleNamespace(param_groups=[{}] if groups is None else groups)
    return OptimizerParamScheduler(optimizer, **{**values, **more})


@pytest.mark.feature(
    "Training: constant, linear, cosine, inverse-square-root, WSD rates; weight-decay ramps"
)
@pytest.mark.parametrize(
    ("style", "more", "table"),
    [
        ("constant", {}, {100: 1.0, 600: 1.0, 1100: 1.0, 99999: 1.0}),
        ("linear", {}, {100: 1.0, 350: 0.775, 600: 0.55, 1100: 0.1, 1101: 0.1}),
        (
            "cosine",
            {},
            {100: 1.0, 350: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 600: 0.55, 1100: 0.1, 9999: 0.1},
        ),
        (
            "inverse-square-root",
            {},
            {100: 1.0, 400: 0.5, 900: 1 / 3, 1100: math.sqrt(1 / 11), 1101: 0.1},
        ),
        ("inverse-square-root", {"min_lr": 0.4}, {400: 0.5, 900: 0.4}),
        ("inverse-square-root", {"lr_warmup_steps": 0}, {0: 1.0, 1: 1.0, 4: 0.5}),
        (
            "WSD",
            {"wsd": "linear"},
            {101: 1.0, 700: 1.0, 900: 0.55, 1100: 0.1, 1101: 0.1},
        ),
        ("WSD", {"wsd": "cosine"}, {700: 1.0, 900: 0.55, 1100: 0.1}),
        (
            "WSD",
            {"wsd": "exponential"},
            {700: 1.0, 900: 0.1 + 0.9 * (math.sqrt(2) - 1)},
        ),
        ("WSD", {"wsd": "exponential"}, {1100: 0.1}),
        ("WSD", {"wsd": "minus_sqrt"}, {700: 1.0, 800: 0.55, 1100: 0.1}),
    ],
)
def test_every_decay_style_follows_its_closed_form(style: str, more: dict, table: dict):
    if style == "WSD":
        more = {"lr_wsd_decay_style": more["wsd"], "wsd_decay_steps": 400}
    curve = schedule(style, **more)
    assert {n: curve.lr(n) for n in table} == pytest.approx(table, rel=1e-12)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root", "WSD"])
def test_warm_up_is_linear_from_the_initial_rate(style: str):
    curve = schedule(style, init_lr=0.2, wsd_decay_steps=400)
    assert [curve.lr(n) for n in (0, 25, 50, 100)] == pytest.approx([0.2, 0.4, 0.6, 1.0])


def test_without_warm_up_training_starts_at_the_maximum():
    assert schedule("linear", lr_warmup_steps=0).lr(0) == PEAK


@pytest.mark.parametrize(
    ("style", "table"),
    [
        ("linear", {0: 0.0, 250: 0.05, 1000: 0.2, 1001: 0.2}),
        ("cosine", {0: 0.0, 250: 0.1 * (1 - math.sqrt(0.5)), 500: 0.1, 1000: 0.2, 5000: 0.2}),
    ],
)
def test_weight_decay_rises_along_its_ramp(style: str, table: dict):
    ramp = schedule("constant", end_wd=0.2, wd_incr_steps=1000, wd_incr_style=style)
    assert {n: ramp.wd(n) for n in table} == pytest.approx(table, abs=1e-15)


def test_constant_weight_decay_is_the_same_everywhere():
    ramp = schedule("constant", start_wd=0.1, end_wd=0.1, wd_incr_steps=10)
    assert [ramp.wd(n) for n in (0, 5, 50)] == [0.1, 0.1, 0.1]


def test_groups_take_their_multipliers_and_their_own_range():
    groups: list[dict] = [
        {"lr_mult": 0.5, "wd_mult": 0.0},
        {"max_lr": 0.2, "min_lr": 0.02, "is_decoupled_lr": True, "wd_mult": 2.0},
    ]
    sched = scheduler(groups)
    assert [g["lr"] for g in groups] == [0.0, 0.0]
    sched.step(600)
    assert groups[0]["lr"] == pytest.approx(0.5 * 0.55)
    assert groups[1]["lr"] == pytest.approx(0.11)
    assert [g["weight_decay"] for g in groups] == pytest.approx([0.0, 2 * 0.064])
    assert sched.current_learning_rates() == pytest.approx((0.55, 0.11))


def test_a_rank_without_decoupled_groups_reports_none():
    assert scheduler().current_learning_rates() == (0.0, None)


def test_a_resumed_schedule_continues_the_uninterrupted_one():
    whole, first, second = scheduler(), scheduler(), scheduler()
    rates = []
    for _ in range(10):
        whole.step(130)
        rates.append(dict(whole.optimizer.param_groups[0]))
    for _ in range(4):
        first.step(130)
    second.load_state_dict(first.state_dict())
    resumed = []
    for _ in range(6):
        second.step(130)
        resumed.append(dict(second.optimizer.param_groups[0]))
    assert resumed == rates[4:]


def test_the_saved_state_has_the_references_names():
    assert set(scheduler().state_dict()) == {
        "max_lr",
        "lr_warmup_steps",
        "num_steps",
        "lr_decay_style",
        "lr_decay_steps",
        "min_lr",
        "start_wd",
        "end_wd",
        "wd_incr_style",
        "wd_incr_steps",
    }


def test_a_changed_schedule_is_refused_with_every_field_named():
    saved = scheduler().state_dict() | {"num_steps": 5}
    sched = scheduler(max_lr=2.0, lr_decay_steps=2000, wd_incr_style="cosine")
    with pytest.raises(CheckpointError) as raised:
        sched.load_state_dict(saved)
    assert "--lr 1.0 -> 2.0" in str(raised.value)
    assert "samples of --lr-decay-* (default: the length of the run) 1100 -> 2000" in str(
        raised.value
    )
    assert "--weight-decay-incr-style linear -> cosine" in str(raised.value)
    assert "--use-checkpoint-opt_param-scheduler" in str(raised.value)
    assert sched.num_steps == 0


def test_a_constant_weight_decay_is_continued_by_a_longer_run():
    constant = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant"}
    saved = scheduler(**constant, wd_incr_steps=6).state_dict() | {"num_steps": 6}
    longer = scheduler(**constant, wd_incr_steps=10)
    longer.load_state_dict(saved)
    assert longer.num_steps == 6


def test_a_constant_learning_rate_is_continued_by_a_longer_run():
    saved = scheduler(lr_decay_style="constant", lr_decay_steps=600).state_dict()
    longer = scheduler(lr_decay_style="constant", lr_decay_steps=1000)
    longer.load_state_dict(saved | {"num_steps": 600})
    assert longer.optimizer.param_groups[0]["lr"] == PEAK


def test_another_length_of_a_rising_weight_decay_is_refused():
    saved = scheduler(wd_incr_steps=6).state_dict()
    with pytest.raises(CheckpointError) as raised:
        scheduler(wd_incr_steps=10).load_state_dict(saved)
    assert "samples of the weight decay increase (--train-iters or --train-samples) 6 -> 10" in str(
        raised.value
    )


def test_a_rising_weight_decay_is_adopted_with_its_length_by_a_constant_one():
    saved = scheduler(wd_incr_steps=6).state_dict() | {"num_steps": 6}
    constant = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant"}
    sched = scheduler(**constant, wd_incr_steps=10, use_checkpoint_opt_param_scheduler=True)
    sched.load_state_dict(saved)
    assert sched.schedule == scheduler(wd_incr_steps=6).schedule


def test_the_checkpoints_schedule_is_kept_on_request(caplog: pytest.LogCaptureFixture):
    saved = scheduler().state_dict() | {"num_steps": 600}
    sched = scheduler(max_lr=2.0, use_checkpoint_opt_param_scheduler=True)
    with caplog.at_level("INFO"):
        sched.load_state_dict(saved)
    assert sched.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)
    assert caplog.messages == ["--lr: 1.0 -> 2.0, kept the checkpoint's"]


def test_the_runs_schedule_is_kept_on_request(caplog: pytest.LogCaptureFixture):
    saved = scheduler().state_dict() | {"num_steps": 600}
    sched = scheduler(lr_decay_style="constant", override_opt_param_scheduler=True)
    with caplog.at_level("INFO"):
        sched.load_state_dict(saved)
    assert sched.optimizer.param_groups[0]["lr"] == PEAK
    assert caplog.messages == ["--lr-decay-style: linear -> constant, kept the run's"]


def test_both_requests_at_once_are_refused():
    with pytest.raises(ConfigError, match="exclude each other"):
        scheduler(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)


@pytest.mark.parametrize("warmup", ["warmup_iter", "warmup_steps"])
@pytest.mark.parametrize("decay", ["end_iter", "decay_steps"])
def test_states_with_older_names_load(warmup: str, decay: str):
    sched = scheduler()
    old = {
        "start_lr": PEAK,
        "min_lr": FLOOR,
        warmup: 100,
        decay: 1100,
        "decay_style": "linear",
        "num_iters": 600,
    }
    sched.load_state_dict(old)
    assert sched.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)


@pytest.mark.parametrize("missing", ["max_lr", "num_steps"])
def test_a_state_without_a_needed_entry_is_refused(missing: str):
    saved = scheduler().state_dict()
    del saved[missing]
    with pytest.raises(CheckpointError, match=f"no entry '{missing}'"):
        scheduler().load_state_dict(saved)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"lr_decay_style": "quadratic"}, "--lr-decay-style quadratic is none of constant"),
        ({"min_lr": 2.0}, r"--min-lr 2.0 must lie between 0 and --lr 1.0"),
        ({"init_lr": 2.0}, r"--lr-warmup-init 2.0 must not exceed --lr 1.0"),
        ({"lr_decay_steps": 0}, "decays over 0 samples, which must be more than 0"),
        ({"lr_warmup_steps": 1100}, "warm-up of 1100 samples must end before .* 1100"),
        ({"lr_decay_style": "WSD"}, "WSD needs --lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 1200}, "anneal phase of 1200 samples"),
        (
            {"lr_decay_style": "WSD", "wsd_decay_steps": 9, "lr_wsd_decay_style": "x"},
            "--lr-wsd-decay-style x is none of linear",
        ),
        ({"wd_incr_style": "sudden"}, "--weight-decay-incr-style sudden is none of"),
        ({"start_wd": 0.5}, "weight decay must rise"),
        ({"wd_incr_style": "constant"}, "constant cannot go from 0.01 to 0.1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(more: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        scheduler(**more)


@dataclass(frozen=True)
class Options:
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0


@pytest.mark.parametrize(
    ("options", "run", "lengths"),
    [
        ({}, {"train_iters": 100}, (0, 800, None, 800)),
        ({"lr_decay_iters": 50, "lr_warmup_iters": 5}, {"train_iters": 100}, (40, 400, None, 800)),
        ({"lr_warmup_fraction": 0.25}, {"train_iters": 100}, (200, 800, None, 800)),
        ({"lr_wsd_decay_iters": 10}, {"train_iters": 100}, (0, 800, 80, 800)),
        ({}, {"train_samples": 1000}, (0, 1000, None, 1000)),
        (
            {"lr_decay_samples": 500, "lr_warmup_samples": 7, "lr_wsd_decay_samples": 90},
            {"train_samples": 1000},
            (7, 500, 90, 1000),
        ),
        ({"lr_warmup_fraction": 0.1}, {"train_samples": 1000}, (100, 1000, None, 1000)),
    ],
)
def test_lengths_are_counted_in_samples(options: dict, run: dict, lengths: tuple):
    length = {"train_iters": None, "train_samples": None, **run}
    found = schedule_lengths(Options(**options), **length, global_batch_size=8)
    assert tuple(found.values()) == lengths


def test_a_run_without_a_length_is_refused():
    with pytest.raises(ConfigError, match="give --train-iters or --train-samples"):
        schedule_lengths(Options(), train_iters=None, train_samples=None, global_batch_size=8)
