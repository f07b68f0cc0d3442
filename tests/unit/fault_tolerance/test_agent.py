"""Processes of a node's ranks, and hangs of ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.fault_tolerance.agent import (
    AttemptAgent,
    HangDetector,
    Process,
    RankProcesses,
)
from megatron.training.fault_tolerance.heartbeat import VARIABLE, HeartbeatFile, Limits


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
    assert not detector.poll(processes), "one poll is not enough"
    assert detector.poll(processes)
    monkeypatch.undo()
    assert list(detector.found) == [0]
    text, order = detector.found[0]
    assert "in section setup" in text
    assert order[0] == 1.0, "its process runs"
    processes.end(0.0, lambda: False)
    assert processes.ends[0].code == -9


def test_a_node_that_comes_back_at_once_is_told_that_the_attempt_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = [[1]]  # at the first request alone
    announced: list[str] = []
    rank = start("import time; time.sleep(600)")
    agent: Any = AttemptAgent.__new__(AttemptAgent)
    agent._worker_group = SimpleNamespace(spec=SimpleNamespace(monitor_interval=0.0), workers=[])
    agent._rendezvous_of_run = SimpleNamespace(
        attempt=SimpleNamespace(has=lambda event: False, announce=announced.append),
        lost_nodes=lambda: lost.pop() if lost else [],
        num_nodes_waiting=lambda: 0,
    )
    agent._stop = SimpleNamespace(first=None, is_second=False)
    agent._limits = SimpleNamespace(peer_timeout=0.0, shutdown_timeout=0.0)
    agent._detector = None
    agent._asked_to_stop_at_s = None
    agent._requested_at_s = 0.0
    agent.processes = RankProcesses({0: rank})
    monkeypatch.setattr(agent, "_initialize_workers", lambda group: None)
    monkeypatch.setattr(agent, "_shutdown", lambda: None)
    agent._invoke_run()
    assert announced == ["ended"]
