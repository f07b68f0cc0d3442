"""Timers: levels, readers that do not disturb each other, the printed block."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.diagnostics import timers as timers_module
from megatron.core.diagnostics.timers import (
    CONSOLE,
    TENSORBOARD,
    DummyTimer,
    Timer,
    Timers,
    format_times,
)
from tests.support.ranks import run_ranks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until its first item is changed."""
    now = [100.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: now[0])
    return now


def _measure(timers: Timers, clock: list[float], name: str, seconds: float) -> None:
    timers(name, log_level=0).start()
    clock[0] += seconds
    timers(name).stop()


def test_a_timer_adds_up_its_intervals_and_elapsed_resets_it(clock: list[float]) -> None:
    timers = Timers(0, "minmax")
    _measure(timers, clock, "a", 2.0)
    clock[0] += 5.0
    _measure(timers, clock, "a", 1.0)
    assert timers("a").elapsed(reset=False) == pytest.approx(3.0)
    assert timers("a").elapsed() == pytest.approx(3.0)
    assert timers("a").elapsed() == 0.0
    assert timers("a").active_time() == pytest.approx(3.0)


def test_a_running_timer_can_be_read_and_goes_on(clock: list[float]) -> None:
    timer = Timer("a")
    timer.start()
    clock[0] += 2.0
    assert timer.elapsed() == pytest.approx(2.0)
    clock[0] += 1.0
    timer.stop()
    assert timer.elapsed() == pytest.approx(1.0)


def test_writing_to_tensorboard_leaves_the_console_its_times(clock: list[float]) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written.append((tag, value, step))

    timers = Timers(0, "max")
    _measure(timers, clock, "optimizer", 4.0)
    timers.write(["optimizer", "never"], Writer(), iteration=7, normalizer=2.0)
    assert written == [("optimizer-time", pytest.approx(2.0), 7)]
    _measure(timers, clock, "optimizer", 1.0)
    assert timers("optimizer").elapsed(reader=TENSORBOARD) == pytest.approx(1.0)
    assert timers("optimizer").elapsed(reader=CONSOLE) == pytest.approx(5.0)


def test_a_timer_above_the_level_measures_nothing() -> None:
    timers = Timers(1, "minmax")
    assert isinstance(timers("fine", log_level=2), DummyTimer)
    timers("fine").start()
    timers("fine").stop()
    assert isinstance(timers("coarse", log_level=1), Timer)
    assert timers.get_all_timers_string() is None
    assert isinstance(timers("nameless"), DummyTimer), "without a level the finest is meant"


def test_a_timer_has_one_level() -> None:
    timers = Timers(2, "minmax")
    timers("a", log_level=1)
    with pytest.raises(AssertionError, match="timer a: level is 1, not 0"):
        timers("a", log_level=0)
    with pytest.raises(AssertionError, match="level 3 is not in 0..2"):
        timers("b", log_level=3)


def test_a_timer_is_not_started_or_stopped_twice() -> None:
    timer = Timer("a")
    with pytest.raises(AssertionError, match="timer a is stopped but not started"):
        timer.stop()
    timer.start()
    with pytest.raises(AssertionError, match="timer a is started twice"):
        timer.start()


def test_the_block_reads_as_log_parsers_expect() -> None:
    times_s = {"forward-backward": [0.5, 0.25], "idle": [0.0, 0.0], "recv": [0.0, 0.1]}
    assert format_times(times_s, "minmax", 10.0) == (
        "(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (25.00, 50.00)\n"
        "    recv ...........................................: (10.00, 10.00)"
    )
    assert format_times(times_s, "max") == (
        "max time across ranks (ms):\n"
        "    forward-backward ...............................: 500.00\n"
        "    recv ...........................................: 100.00"
    )
    assert format_times(times_s, "all") == (
        "times across ranks (ms):\n"
        "  forward-backward:\n"
        "     rank  0: 500.00\n"
        "     rank  1: 250.00\n"
        "  recv:\n"
        "     rank  1: 100.00"
    )
    assert format_times({"idle": [0.0]}, "minmax") is None


def _block_of_two_ranks(rank: int, world_size: int) -> tuple[Any, dict[str, list[float]]]:
    clock = [0.0]
    timers_module.time.perf_counter = lambda: clock[0]  # type: ignore[assignment]
    timers = Timers(0, "minmax")
    _measure(timers, clock, "both", 1.0 + rank)
    if rank == 1:
        _measure(timers, clock, "second", 3.0)
    return (
        timers.get_all_timers_string(["both", "second"], reset=False, barrier=True),
        timers.times_s(["both", "second"]),
    )


@pytest.mark.feature("Logging: timers compared over ranks")
def test_ranks_are_compared_also_where_one_has_no_such_timer() -> None:
    for text, times_s in run_ranks(_block_of_two_ranks, 2):
        assert text.splitlines()[1:] == [
            "    both ...........................................: (1000.00, 2000.00)",
            "    second .........................................: (3000.00, 3000.00)",
        ]
        assert times_s == {"both": [1.0, 2.0], "second": [0.0, 3.0]}
