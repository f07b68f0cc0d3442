"""Heartbeat files: what a rank writes, another process reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.config.errors import LaunchError
from megatron.core.diagnostics import collective_tracer
from megatron.training.fault_tolerance.heartbeat import (
    HeartbeatFile,
    is_stopped,
    read_heartbeats,
)
from tests.support.ranks import run_ranks


def test_a_reader_sees_section_and_iteration(tmp_path: Path) -> None:
    before_ns = time.monotonic_ns()
    for rank in (11, 2):
        file = HeartbeatFile(tmp_path, rank)
    (first, second) = read_heartbeats(tmp_path)
    assert (first.rank, second.rank) == (2, 11)
    assert (first.section, first.pid, first.collective) == ("setup", os.getpid(), "")
    file.at_iteration(7)
    file.begin("step")
    beat = read_heartbeats(tmp_path)[0]
    assert (beat.section, beat.iteration) == ("step", 7)
    assert before_ns <= beat.sign_ns <= time.monotonic_ns()


def test_files_that_are_no_heartbeats_are_skipped(tmp_path: Path) -> None:
    HeartbeatFile(tmp_path, 0)
    whole = (tmp_path / "rank_0").read_bytes()
    (tmp_path / "rank_1").write_bytes(whole[:-1])
    (tmp_path / "rank_2").write_bytes(bytes(len(whole)))
    (tmp_path / "rank_x").write_bytes(whole)
    (tmp_path / "rank_3").mkdir()
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [0]
    assert read_heartbeats(tmp_path / "missing") == []


def test_a_folder_that_is_missing_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"MEGATRON_HEARTBEAT_DIR=.*rank 3 \(No such file"):
        HeartbeatFile(tmp_path / "missing", 3)


def communicate(rank: int, world_size: int, folder: str) -> None:
    file = HeartbeatFile(folder, rank)
    record = collective_tracer.record
    record.board = collective_tracer.Board(file.board, file.name)
    collective_tracer.note_collectives()
    dist.all_reduce(torch.ones(1))
    other = dist.new_group([0, 1])
    first = dist.all_reduce(torch.ones(1), async_op=True)
    dist.all_reduce(torch.ones(1), group=other)
    before = read_heartbeats(folder)[rank]
    assert not before.is_in_collective
    assert before.collective.endswith("all_reduce of ranks 0 1, call 1")
    record.board.wait(id(first))  # the wait is for the older of two collectives
    inside = read_heartbeats(folder)[rank]
    assert str(inside) == (
        f"rank {rank} (process {os.getpid()}) waits in world all_reduce of ranks 0 1, call 2"
    )
    first.wait()
    assert not read_heartbeats(folder)[rank].is_in_collective
    record.board = None
    dist.barrier()


def test_the_collective_of_a_rank_is_shown(tmp_path: Path) -> None:
    run_ranks(communicate, 2, str(tmp_path))


def test_the_state_of_a_process_is_told_apart() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(child.pid)
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_stopped(child.pid)
    child.communicate()
    assert not is_stopped(child.pid)
