"""Decisions about attempts, without processes."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.fault_tolerance.inprocess.coordinator import (
    Coordinator,
    Decision,
    End,
    Kill,
    Policy,
    Start,
    Stop,
)


class Run:
    """A coordinator of 4 workers, 3 of them active, and a clock."""

    def __init__(self, **policy: Any) -> None:
        values = {
            "active": 3,
            "granularity": "rank",
            "max_attempts": None,
            "barrier_s": 100.0,
            "completion_s": 50.0,
            "last_call_s": 1.0,
        }
        self.coordinator = Coordinator(Policy(**{**values, **policy}), ["a"] * 4)
        self.now_s = 0.0

    def take(self, kind: str, worker: int, **values: Any) -> list[Decision]:
        event = {"kind": kind, "worker": worker, "attempt": self.coordinator.number, **values}
        self.coordinator.take(event, self.now_s)
        return self.coordinator.decide(self.now_s)

    def wait(self, seconds: float) -> list[Decision]:
        self.now_s += seconds
        return self.coordinator.decide(self.now_s)

    def ready(self, *workers: int) -> list[Decision]:
        found: list[Decision] = []
        for worker in workers:
            found += self.take("ready", worker)
        return found

    def fault(self, worker: int, text: str, **values: Any) -> list[Decision]:
        return self.take("fault", worker, text=text, **{"is_primary": True, **values})

    def late(self, worker: int, text: str, **values: Any) -> None:
        """Report a fault of the attempt that has stopped."""
        event = {"kind": "fault", "worker": worker, "text": text, "is_primary": True, **values}
        event["attempt"] = self.coordinator.number - 1
        self.coordinator.take(event, self.now_s)

    def restarted(self, *ready: int) -> Start | End:
        """Wait for the last call, then for the workers; return the decision."""
        self.wait(1.0)
        (decision,) = self.ready(*ready)
        assert isinstance(decision, Start | End)
        return decision


def started(**policy: Any) -> Run:
    run = Run(**policy)
    assert run.ready(0, 1, 2) == []
    active = tuple(range(run.coordinator.policy.active))
    assert run.ready(3) == [Start(0, active, "")]
    return run


def test_an_undisturbed_run_ends_when_all_active_workers_have_finished() -> None:
    run = started()
    assert run.take("finished", 0) == run.take("finished", 1) == []
    assert run.take("finished", 2) == [End(0, "")]
    assert run.take("dead", 1, text="") == []


def test_the_place_of_a_dead_worker_is_taken_by_the_reserve() -> None:
    run = started()
    text = "rank 1 failed: its process has ended"
    assert run.take("dead", 1, text="its process has ended") == [Stop(0, text)]
    assert run.ready(0, 2, 3) == [], "other faults may be reported"
    expected = f"{text}; reserve 3 becomes rank 1, restart 1 inside the processes"
    assert run.wait(1.0) == [Start(1, (0, 3, 2), expected)]
    (stop,) = run.take("dead", 3, text="x")
    assert stop == Stop(1, "rank 1 failed: x")
    assert run.restarted(0, 2) == End(
        1,
        "rank 1 failed: x; no reserve is left: 2 of 4 ranks live and "
        "--inprocess-active-world-size is 3",
    )


def test_a_dead_reserve_does_not_stop_the_run() -> None:
    run = started()
    assert run.take("dead", 3, text="x") == []
    run.take("dead", 0, text="y")
    assert isinstance(run.restarted(1, 2), End)


def test_the_first_cause_is_no_consequence() -> None:
    run = started()
    run.fault(0, "connection closed", is_primary=False)
    run.late(2, "ValueError: boom")
    start = run.restarted(0, 1, 2, 3)
    assert start.text.startswith("rank 2 failed: ValueError: boom; reserve 3 becomes rank 2")


def test_of_ranks_that_waited_too_long_the_one_that_did_not_wait_is_the_cause() -> None:
    run = started()
    run.fault(0, "no progress, it waits", is_primary=False, is_stall=True)
    event = {"kind": "computing", "worker": 1, "attempt": 0, "text": "it is in no collective"}
    run.coordinator.take(event, run.now_s)
    start = run.restarted(0, 1, 2, 3)
    assert start.text.startswith("rank 1 failed: it is in no collective; reserve 3 becomes rank 1")


def test_two_faults_at_once_are_one_restart_and_need_two_reserves() -> None:
    run = started(active=2)
    run.take("dead", 0, text="x")
    run.late(1, "ValueError: boom")
    assert run.restarted(1, 2, 3) == Start(
        1,
        (2, 3),
        "rank 0 failed: x; reserve 2 becomes rank 0, reserve 3 becomes rank 1, restart 1 inside "
        "the processes",
    )


def test_a_late_worker_is_ended_and_replaced() -> None:
    run = started()
    run.fault(0, "ValueError: boom")
    run.ready(0, 1, 3)
    decisions = run.wait(101.0)
    assert decisions[0] == Kill(2)
    assert isinstance(decisions[1], Start)
    assert decisions[1].active == (0, 1, 3)


def test_finished_workers_wait_for_the_others_for_the_completion_time() -> None:
    run = started()
    run.take("finished", 0)
    run.take("finished", 1)
    assert run.wait(49.0) == []
    text = "rank 2 failed: it did not finish within 50 s after the first rank"
    assert run.wait(2.0) == [Stop(0, text)]


def test_an_error_that_no_restart_cures_ends_the_run_with_its_code() -> None:
    run = started()
    expected = End(65, "rank 1 failed: DataError: x")
    assert run.take("end", 1, code=65, text="DataError: x") == [expected]


def test_attempts_are_limited() -> None:
    run = started(max_attempts=2)
    run.fault(0, "boom", step=1)
    assert isinstance(run.restarted(0, 1, 2, 3), Start)
    run.fault(1, "boom", step=2)
    end = run.restarted(0, 1, 2, 3)
    assert end == End(1, "rank 1 failed: boom; --inprocess-max-iterations 2 is reached")


@pytest.mark.parametrize("steps", [[5, 5, 5, 5], [None, None, None]])
def test_attempts_without_a_new_step_end_the_run(steps: list[int | None]) -> None:
    run = started()
    for step in steps[:-1]:
        run.fault(1, "boom", step=step)
        assert isinstance(run.restarted(0, 1, 2, 3), Start)
    run.fault(1, "boom", step=steps[-1])
    end = run.restarted(0, 1, 2, 3)
    assert isinstance(end, End)
    assert "3 attempts in a row have finished no new step: another restart is pointless" in end.text


def test_blamed_ranks_are_excluded() -> None:
    run = started()
    run.fault(0, "weights differ", excluded=[2])
    assert run.coordinator.lost == {2}
    start = run.restarted(0, 1, 3)
    assert isinstance(start, Start)
    assert start.active == (0, 1, 3)
    assert start.text.startswith("rank 2 failed: excluded: weights differ")


def test_a_rejected_result_ends_the_run_unless_a_rank_is_blamed() -> None:
    run = started()
    run.fault(0, "SystemExit: 17", code=17)
    assert run.restarted(0, 1, 2, 3) == End(17, "rank 0 failed: SystemExit: 17")
    run = started()
    run.fault(0, "SystemExit: 17", code=17)
    run.late(1, "SystemExit: 17", code=17, excluded=[1])
    start = run.restarted(0, 2, 3)
    assert isinstance(start, Start)
    assert start.active == (0, 3, 2)


def test_events_of_another_attempt_are_ignored() -> None:
    run = started()
    run.fault(0, "boom")
    run.coordinator.take({"kind": "finished", "worker": 1, "attempt": 0}, 0.0)
    run.coordinator.take({"kind": "ready", "worker": 1, "attempt": 0}, 0.0)
    run.wait(1.0)
    assert run.ready(0, 2, 3) == []
