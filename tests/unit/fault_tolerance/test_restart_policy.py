"""What follows the end of an attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.training.fault_tolerance.restart_policy import (
    Decision,
    History,
    NodeReport,
    Options,
    Outcome,
    RankEnd,
    decide,
    from_json,
    outcome_of,
    to_json,
)

OPTIONS = Options(max_no_progress_restarts=3, min_progress_iterations=10)


def outcome(reason: str = "rank 1 failed: ValueError: boom", **values: Any) -> Outcome:
    report = {"code": 1, "reason": reason, "iteration": 5, "caused_by": None, **values}
    rank = RankEnd(rank=1, code=report["code"], at_s=0.0, report=report)
    return outcome_of([NodeReport(node="a", ranks=(rank,))])


def failures(*outcomes: Outcome, options: Options = OPTIONS, **how: Any) -> list[Decision]:
    history = History()
    decisions = []
    for each in outcomes:
        decisions.append(decide(history, each, options, **how))
        history = decisions[-1].history
    return decisions


@pytest.mark.parametrize(
    ("code", "restarts"), [(2, False), (65, False), (1, True), (16, True), (17, False)]
)
def test_errors_that_no_restart_cures_are_not_restarted(code: int, restarts: bool) -> None:
    decision = decide(History(), outcome(code=code), OPTIONS)
    assert (decision.restarts, decision.code) == (restarts, 0 if restarts else code)


def test_the_same_failure_at_the_same_step_gets_another_placement_then_an_older_checkpoint() -> (
    None
):
    at_4 = outcome(loaded_iteration=4, loaded_from="/c/iter_0000004")
    first, second, third, fourth = failures(at_4, at_4, at_4, at_4, older_checkpoint=lambda _: 2)
    assert (first.history.placement, first.history.ckpt_step) == (0, None)
    assert (second.history.placement, second.history.ckpt_step) == (1, None)
    assert (third.history.ckpt_step, third.history.blamed) == (2, (4,))
    assert not fourth.restarts
    assert "it is deterministic" in fourth.why


def test_a_reproducible_rejected_result_gets_an_older_checkpoint_then_ends_the_run() -> None:
    first = outcome(code=16, saved_iteration=4)
    second = outcome(code=17, loaded_iteration=4, loaded_from="/c/iter_0000004")
    again = outcome(code=16, loaded_iteration=2, saved_iteration=4, loaded_from="/c/iter_0000002")
    decisions = failures(first, second, again, second, older_checkpoint=lambda _: 2)
    assert [decision.restarts for decision in decisions] == [True, True, True, False]
    assert (decisions[1].history.ckpt_step, decisions[1].history.blamed) == (2, (4,))
    assert decisions[2].history.ckpt_step is None, "the run has saved a checkpoint of its own"
    assert decisions[3].code == 17
    assert "a rejected result on every start at iteration 5" in decisions[3].why


def test_without_an_older_checkpoint_the_third_equal_failure_ends_the_run() -> None:
    *_, third = failures(outcome(), outcome(), outcome())
    assert not third.restarts
    assert "on different rank placements: it is deterministic" in third.why
    assert third.code == 1


def test_a_failure_on_another_rank_or_step_of_the_message_is_the_same_failure() -> None:
    a = outcome("rank 1 failed: X: at 5")
    b = outcome("rank 0 failed: X: at 77")
    assert a.signature == b.signature


def test_a_new_checkpoint_ends_the_choice_of_an_older_one() -> None:
    history = History(attempts=3, saved_iteration=4, ckpt_step=2, blamed=(4,))
    again = decide(history, outcome(loaded_iteration=2, saved_iteration=4), OPTIONS)
    assert (again.history.ckpt_step, again.history.blamed) == (None, (4,)), "no progress yet"
    newer = decide(history, outcome(loaded_iteration=2, saved_iteration=6), OPTIONS)
    assert (newer.history.ckpt_step, newer.history.blamed) == (None, ())
    older = decide(history, outcome(loaded_iteration=2), OPTIONS)
    assert older.history.ckpt_step == 2, "nothing was saved: the newest is still the blamed one"


def test_restarts_without_progress_are_limited() -> None:
    different = [outcome(f"Error{'x' * i}: boom") for i in range(4)]
    *restarted, last = failures(*different)
    assert all(decision.restarts for decision in restarted)
    assert not last.restarts
    assert last.why.startswith("3 restarts without a new checkpoint or 10 new steps")


@pytest.mark.parametrize("progress", ["saved_iteration", "iteration"])
def test_progress_renews_the_budget(progress: str) -> None:
    several = [outcome(**{progress: 100 * i}) for i in range(1, 20)]
    assert all(decision.restarts for decision in failures(*several))


def test_the_plain_maximum_holds_beside_the_budget() -> None:
    several = [outcome(saved_iteration=100 * i) for i in range(1, 6)]
    decisions = failures(*several, options=Options(max_restarts=3))
    assert [d.restarts for d in decisions[:4]] == [True, True, True, False]
    assert decisions[3].why == "--max-restarts 3 is reached"


def test_no_restart_at_all_can_be_asked_for() -> None:
    assert not decide(History(), outcome(), Options(max_restarts=0)).restarts


def test_the_pause_doubles_without_progress_and_is_bounded() -> None:
    several = [outcome(f"Error{'x' * i}: boom") for i in range(10)]
    options = Options(max_no_progress_restarts=20, restart_backoff=2.0)
    pauses = [decision.backoff_s for decision in failures(*several, options=options)]
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60, 60, 60]


def test_an_unexpected_result_gets_another_placement() -> None:
    assert decide(History(), outcome(code=16), OPTIONS).history.placement == 1


@pytest.mark.parametrize(("has_spare", "excluded"), [(True, ("a",)), (False, ())])
def test_a_blamed_node_is_excluded_if_there_is_a_spare_one(
    has_spare: bool, excluded: tuple[str, ...]
) -> None:
    blamed = outcome(code=17, suspects=[{"rank": 1, "host": None, "why": "wrong sum"}])
    assert blamed.suspects == (("a", "wrong sum"),)
    decision = decide(History(), blamed, OPTIONS, has_spare_node=has_spare)
    assert decision.restarts
    assert decision.history.excluded == excluded
    assert decision.history.placement == (0 if has_spare else 1)


def test_a_stop_signal_ends_the_run() -> None:
    saved = RankEnd(rank=0, code=0, at_s=0.0, report={"kind": "stopped", "saved_iteration": 7})
    killed = RankEnd(rank=0, code=-15, at_s=0.0)
    for rank, code in ((saved, 0), (killed, 128 + 10)):
        ended = outcome_of([NodeReport(node="a", ranks=(rank,), stop_signal=10)])
        decision = decide(History(), ended, OPTIONS)
        assert (decision.restarts, decision.code) == (False, code)


def test_nodes_that_join_restart_the_run_without_a_failure() -> None:
    stopped = outcome(code=0, reason="SIGTERM", kind="stopped", saved_iteration=5)
    joined = decide(History(), stopped, OPTIONS, is_join=True)
    assert joined.restarts
    assert (joined.history.restarts, joined.history.no_progress) == (0, 0)
    done = decide(History(), replace(stopped, was_stopped=False), OPTIONS, is_join=True)
    assert not done.restarts, "the run was done when the nodes wanted to join"


def test_decisions_are_exchanged_as_text() -> None:
    decision = failures(outcome(), outcome())[-1]
    assert from_json(Decision, to_json(decision)) == decision
