"""Ranks of a run watch each other: one that is stopped or hangs ends the run, by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.training.fault_tolerance import sections
from megatron.training.fault_tolerance.failure_watch import failure_watch
from megatron.training.fault_tolerance.heartbeat import Limits
from tests.support.ranks import run_ranks


def hang() -> None:
    while True:
        time.sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def train(rank: int, world_size: int, folder: str, fault: Callable[[], None]) -> None:
    """Train until rank 1 hangs in the third step; its peers wait in an all-reduce."""
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    monitor = sections.monitor
    monitor.enable(None, learns=False)
    monitor.limits = Limits({"step": 0.5})
    with failure_watch(poll_s=0.05, find_hang=monitor.find_hang()):
        for iteration in (1, 2, 3):
            monitor.begin_step(iteration)
            dist.all_reduce(torch.ones(1))
            if rank == 1 and iteration == 3:
                fault()
            dist.all_reduce(torch.ones(1))
            monitor.end_step()


@pytest.mark.feature("Running: a rank that hangs or is stopped is named within a learned limit")
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (stop, "rank 1 failed: its process is stopped, or its host is lost: "),
        (hang, "rank 1 failed: it hangs in section step of iteration 3: no sign for "),
    ],
)
def test_a_hanging_rank_ends_the_run(tmp_path: Path, fault: Callable[[], None], why: str) -> None:
    with pytest.raises(AssertionError, match=r"exit code 1|killed by signal 9"):
        run_ranks(train, 3, str(tmp_path), fault)
    for rank in (0, 2):
        said = (tmp_path / f"stderr{rank}").read_text()
        assert f"\n{why}" in said
        assert f"rank {rank} waits in world all_reduce of ranks 0 1 2, call 7" in said
        assert "in train\n" in said, "the stack"
    said = (tmp_path / "stderr1").read_text()
    assert ("in hang\n" in said) == (fault is hang)
