"""The first cause among the ends of all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.training.fault_tolerance.restart_policy import (
    NodeReport,
    Outcome,
    RankEnd,
    from_json,
    outcome_of,
    read_reports,
    to_json,
)


def end(rank: int, status: int | None, at_s: float, /, **values: Any) -> RankEnd:
    known = {
        name: values.pop(name) for name in ("hang", "hang_order", "was_ended") if name in values
    }
    return RankEnd(rank=rank, code=status, at_s=at_s, report=values, **known)


def test_a_killed_rank_comes_before_the_ranks_that_report_it() -> None:
    reported = end(0, 1, 0.0, code=1, caused_by=1, reason="rank 1 failed: its process has ended")
    ended = end(2, -15, 0.5, was_ended=True)
    outcome = outcome_of([NodeReport(node="a", ranks=(reported, end(1, -9, 1.0), ended))])
    assert outcome.cause == "rank 1 on a: ended by SIGKILL without a report"
    assert [cause.split()[1] for cause in outcome.causes] == ["1", "0", "2"]
    assert not outcome.is_done


def test_a_lost_connection_is_the_consequence_of_a_rank_on_another_node() -> None:
    reason = "rank 0 failed: RuntimeError: Connection closed by peer"
    here = NodeReport(node="a", ranks=(end(0, 1, 0.0, code=1, reason=reason),))
    there = NodeReport(node="b", ranks=(end(1, -11, 5.0),))
    assert outcome_of([here, there]).cause == "rank 1 on b: ended by SIGSEGV without a report"


def test_a_lost_node_comes_before_the_failures_of_the_others() -> None:
    here = NodeReport(node="a", ranks=(end(0, 1, 0.0, code=1, reason="rank 0 failed: X: y"),))
    outcome = outcome_of([here], ["b"])
    assert (outcome.cause, outcome.signature) == ("node lost: b", "node lost")


def test_a_stopped_process_comes_before_the_ranks_that_wait_for_it() -> None:
    waits = end(0, -9, 0.0, hang="waits in all_reduce", hang_order=(1.0, 1.0, -9.0))
    stopped = end(1, -9, 1.0, hang="its process is stopped", hang_order=(0.0, 0.0, -8.0))
    outcome = outcome_of([NodeReport(node="a", ranks=(waits, stopped))])
    assert outcome.cause == "rank 1 on a: hang: its process is stopped"


def test_a_rank_that_crashes_after_its_report_has_not_ended_well() -> None:
    outcome = outcome_of([NodeReport(node="a", ranks=(end(0, -11, 0.0, code=0, kind="done"),))])
    assert not outcome.is_done
    assert "SIGSEGV" in outcome.cause


def test_the_user_s_error_decides_the_exit_status() -> None:
    ranks = (end(0, 2, 1.0, code=2, reason="ConfigError: x"), end(1, -15, 0.0, was_ended=True))
    assert outcome_of([NodeReport(node="a", ranks=ranks)]).code == 2


def test_a_script_without_reports_is_judged_by_its_exit_status() -> None:
    assert outcome_of([NodeReport(node="a", ranks=(end(0, 0, 0.0),))]).is_done
    assert outcome_of([NodeReport(node="a", ranks=(end(0, 2, 0.0),))]).code == 2


def test_reports_of_nodes_are_exchanged_as_text() -> None:
    report = NodeReport(node="a", ranks=(end(0, 1, 2.0, code=1, hang="x", hang_order=(1.0,)),))
    again = from_json(NodeReport, to_json(report))
    assert outcome_of([again]) == outcome_of([report])


def test_an_outcome_is_stored_as_text() -> None:
    suspects = [{"rank": 0, "host": None, "why": "its weights differ"}]
    outcome = outcome_of([NodeReport(node="a", ranks=(end(0, 17, 0.0, suspects=suspects),))])
    assert outcome.suspects == (("a", "its weights differ"),)
    assert from_json(Outcome, to_json(outcome)) == outcome


def test_an_unreadable_exit_report_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank_0.json").write_text(json.dumps({"rank": 0, "code": 1}))
    (tmp_path / "rank_1.json").write_text("{")
    (tmp_path / "rank_2.json").write_text("[]")
    assert list(read_reports(tmp_path)) == [0]
