"""Limits of sections: learned from durations, without a false alarm."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.training.fault_tolerance.heartbeat import (
    DEFAULTS_S,
    FLOORS_S,
    OUT_OF_SECTION,
    Durations,
    Hang,
    HangWatch,
    Heartbeat,
    Limits,
)

BEAT = Heartbeat(
    rank=1,
    pid=42,
    section="step",
    iteration=12,
    sign_ns=0,
    is_in_collective=True,
    collective="tp all_reduce of ranks 0 1, call 9",
)


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


def durations(section: str, *seconds: float) -> Durations:
    seen = Durations()
    for value in seconds:
        seen.add(section, value)
    return seen


def test_a_hang_names_rank_collective_section_and_limit() -> None:
    limits = Limits({"step": 30.0})
    assert limits.verdict(BEAT, ns(30)) is None
    assert str(limits.verdict(BEAT, ns(31))) == (
        "rank 1 (process 42) waits in tp all_reduce of ranks 0 1, call 9 (no sign for 31 s in "
        "section step of iteration 12, the limit is 30 s)"
    )
    assert limits.verdict(replace(BEAT, sign_ns=ns(20)), ns(31)) is None, "its collectives progress"
    assert limits.verdict(replace(BEAT, section="ended"), ns(1e6)) is None
    outside = limits.verdict(replace(BEAT, section=""), ns(1e6))
    assert "outside of all sections" in str(outside)


def test_a_limit_is_learned_from_enough_durations() -> None:
    limits = Limits()
    assert limits.merged(durations("step", *[20.0] * 15)) == limits
    learned = limits.merged(durations("step", *[20.0] * 15, 30.0))
    assert learned.limit_s("step") == 150.0
    assert set(learned.learned) == {"step"}
    assert learned.limit_s("setup") == DEFAULTS_S["setup"]
    assert limits.merged(durations("step", *[0.01] * 16)).limit_s("step") == FLOORS_S["step"]


def test_limits_of_a_later_run_rise_at_once_and_fall_slowly() -> None:
    limits = Limits().merged(durations("checkpointing", 100.0, 60.0))
    assert limits.limit_s("checkpointing") == 500.0
    lower = limits.merged(durations("checkpointing", 40.0, 60.0))
    assert lower.limit_s("checkpointing") == 400.0
    assert lower.merged(durations("checkpointing", 1, 200.0)).limit_s("checkpointing") == 1000.0


def test_limits_are_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "ft_state.json"
    limits = Limits().merged(durations("step", *[20.0] * 16))
    limits = limits.merged(durations(OUT_OF_SECTION, *[30.0] * 16))
    limits.save(path)
    assert Limits.load(path) == limits
    assert list(tmp_path.iterdir()) == [path]


def test_only_limits_that_were_learned_are_saved(tmp_path: Path) -> None:
    limits = Limits().merged(durations("step", *[20.0] * 16))
    limits.save(tmp_path / "ft_state.json")
    assert Limits.load(tmp_path / "ft_state.json") == limits


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"current_timeouts": 3}', '{"current_timeouts": {"section": []}}'),
        '{"current_timeouts": {"section": {"section": {"step": "x", "setup": -1, "spam": 3}}}}',
        '{"current_timeouts": {"section": {"section": {"step": NaN}, "out_of_section": null}}}',
        '{"current_timeouts": {"section": {"is_out_of_section_calculated": true}}}',
    ],
)
def test_a_damaged_state_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    (tmp_path / "ft_state.json").write_text(text)
    assert Limits.load(tmp_path / "ft_state.json") == Limits()


def test_a_hang_counts_once_two_polls_have_found_it() -> None:
    limits = Limits({"step": 30.0})
    watch = HangWatch()
    beats = [BEAT, replace(BEAT, rank=0, sign_ns=ns(1), is_in_collective=False)]
    assert watch.poll(beats, limits, ns(40)) == []
    moved = [replace(beat, sign_ns=ns(40)) for beat in beats]
    assert watch.poll(moved, limits, ns(71)) == []
    assert len(watch.poll(moved, limits, ns(72))) == 2


class SimulatedRun:
    """A run in simulated time, polled by a watcher; each section learns."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.base_s = 10 ** self.chance.uniform(-2, 1.5)  # of a step
        self.limits = Limits()
        self.seen = Durations()
        self.watch = HangWatch()
        self.now_s = 0.0

    def spend(self, section: str, seconds: float) -> None:
        beat = replace(BEAT, section=section, sign_ns=ns(self.now_s))
        for share in sorted(self.chance.random() for _ in range(3)):
            assert self.hangs(beat, self.now_s + share * seconds) == []
        self.now_s += seconds
        self.seen.add(section, seconds)

    def hangs(self, beat: Heartbeat, now_s: float) -> list[Hang]:
        return self.watch.poll([beat], self.limits, ns(now_s))

    def step(self, number: int) -> None:
        """A step with its log, some with a data stall or a garbage collection, and what follows."""
        noise = self.chance.lognormvariate(0, 0.25)
        stall_s = self.chance.choice((0, 0, min(20.0, 2 * self.base_s), 2)) * (number % 7 == 0)
        self.spend("step", self.base_s * noise + stall_s)
        self.spend(OUT_OF_SECTION, self.chance.uniform(0, 5) if number % 10 == 0 else 0.02)
        if number % 50 == 0:
            for _ in range(4):  # evaluation
                self.spend("step", self.base_s * noise)
            self.spend("checkpointing", (40 if number == 50 else 15) * self.chance.uniform(1, 2))
        self.limits = Limits().merged(self.seen)


@pytest.mark.parametrize("seed", range(50))
def test_200_noisy_steps_raise_no_alarm_and_a_stop_is_found_within_the_limit(seed: int) -> None:
    run = SimulatedRun(seed)
    run.spend("setup", 60 + 20 * run.base_s)  # with the first step
    for number in range(1, 201):
        run.step(number)
    beat = replace(BEAT, sign_ns=ns(run.now_s))
    late_s = run.now_s + run.limits.limit_s("step")
    assert run.hangs(beat, late_s - 1) == run.hangs(beat, late_s + 1) == []
    assert run.hangs(beat, late_s + 2)
    assert run.limits.limit_s("step") <= max(30, 5 * run.seen.longest_s["step"])
