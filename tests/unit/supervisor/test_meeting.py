"""The exchange of nodes in an attempt, their processes, and hangs of their ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.training.fault_tolerance.heartbeat import VARIABLE, HeartbeatFile
from megatron.training.fault_tolerance.limits import Limits
from megatron.training.supervisor import meeting
from megatron.training.supervisor.evidence import NodeReport
from megatron.training.supervisor.hangs import HangDetector
from megatron.training.supervisor.meeting import Meeting
from megatron.training.supervisor.policy import Decision, History
from megatron.training.supervisor.processes import Process, RankProcesses


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[Meeting]:
    """Two nodes with one store; a node counts as lost at once."""
    monkeypatch.setattr(meeting, "_POLL_S", 0.0)
    store = dist.HashStore()
    return [Meeting(store, rank, 2, node_timeout_s=0.0) for rank in range(2)]


def test_a_node_without_a_sign_of_life_is_lost(meetings: list[Meeting]) -> None:
    here, there = meetings
    assert here.neighbour() == [1]
    assert here.lost([1]) == [], "it is seen for the first time"
    there.beat()
    assert here.lost([1]) == []
    assert here.lost([1]) == [1]


def test_the_reports_of_all_nodes_are_collected(meetings: list[Meeting]) -> None:
    here, there = meetings
    polls: list[int] = []

    def other() -> None:
        if not polls:
            there.beat()
            there._store.set("report/1", NodeReport(node="b").to_text())
        polls.append(1)

    reports, lost = here.collect(NodeReport(node="a"), 60.0, other)
    assert [report.node for report in reports] == ["a", "b"]
    assert lost == []


def test_a_lost_node_does_not_hold_up_the_others(meetings: list[Meeting]) -> None:
    reports, lost = meetings[0].collect(NodeReport(node="a"), 60.0, lambda: None)
    assert ([report.node for report in reports], lost) == (["a"], [1])


def test_all_nodes_take_the_decision_that_was_written_first(meetings: list[Meeting]) -> None:
    one = Decision(restarts=True, code=0, why="x", history=History(attempts=1))
    two = Decision(restarts=False, code=1, why="y", history=History(attempts=1))
    assert meetings[0].agree(one) == one
    assert meetings[1].agree(two) == one


def start(code: str) -> Process:
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def test_ranks_that_end_by_themselves_are_not_ended() -> None:
    processes = RankProcesses({0: start("raise SystemExit(3)"), 1: start("pass")})
    processes.end(60.0)
    assert {rank: end.code for rank, end in processes.ends.items()} == {0: 3, 1: 0}
    assert not any(end.was_ended for end in processes.ends.values())
    assert processes.has_failure


def test_a_stopped_rank_and_its_children_are_ended() -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    rank = start(f"import os, signal, subprocess, sys; print({child}.pid, flush=True); {stop}")
    processes = RankProcesses({0: rank})
    processes.end(0.0, lambda: False)  # a second signal: at once
    assert processes.ends[0].code == -9
    assert processes.ends[0].was_ended


def test_a_silent_rank_is_found_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits({"setup": 0.0, "step": 600.0})
    detector = HangDetector(tmp_path / "beats", lambda: limits)
    monkeypatch.setenv(VARIABLE, "")
    detector.begin()
    handle = "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: None)"
    wait = [sys.executable, "-c", f"{handle}; print('up', flush=True); time.sleep(600)"]
    ranks = {
        rank: subprocess.Popen(wait, start_new_session=True, stdout=subprocess.PIPE)
        for rank in range(2)
    }
    for rank in ranks.values():
        assert rank.stdout is not None
        rank.stdout.readline()
    beats = {rank: HeartbeatFile(tmp_path / "beats", rank) for rank in ranks}
    beats[1].begin("step")
    processes = RankProcesses(ranks)
    processes.poll()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert not detector.look(processes), "one look is not enough"
    assert detector.look(processes)
    monkeypatch.undo()
    assert list(detector.found) == [0]
    text, order = detector.found[0]
    assert "in section setup" in text
    assert order[0] == 1.0, "its process runs"
    processes.end(0.0, lambda: False)
    assert processes.ends[0].code == -9
