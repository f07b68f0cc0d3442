"""Runs under torchrun that restart inside their processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from pathlib import Path

import pytest

from megatron.core import optional
from megatron.core.distributed.data_parallel_base import DataParallelBase
from tests import forked
from tests.functional.runs import ON_HOST, TINY, losses, run_gpt, train_gpt
from tests.ranks import ROOT, run_ranks

RESTART = "--inprocess-restart --inprocess-granularity rank --inprocess-active-world-size 2"
FLAGS = "--hidden-dropout 0.1 --save-interval 2 --inprocess-last-call-wait 0.2"
FAST = "--inprocess-soft-timeout 5 --inprocess-hard-timeout 8"


def train(
    folder: Path, faults: str, *flags: str, script: str = "pretrain_gpt.py"
) -> subprocess.CompletedProcess[str]:
    """Train with two active ranks and one reserve."""
    command = [*forked.torchrun(3), script, *TINY, *RESTART.split(), *FLAGS.split()]
    command += ["--metrics-file", str(folder / "metrics.jsonl"), "--save", str(folder / "ck")]
    environment = {**os.environ, "FAULTS": faults, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def losses_of(folder: Path) -> dict[int, set[float]]:
    """Return iteration -> the losses that its executions had."""
    found: dict[int, set[float]] = {}
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "lm loss" in line:
            found.setdefault(line["iteration"], set()).add(line["lm loss"])
    return found


@pytest.mark.feature("Faults: a reserve takes the place of a rank inside the processes")
@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        (
            "step.before:kill:rank1:step5:start0",
            "was killed by SIGKILL; reserve 2 becomes rank 1",
        ),
        ("evaluate.iter:raise:rank0:start0", "rank 0 failed: InjectedFault: injected by FAULTS"),
    ],
)
def test_losses_after_a_fault_are_those_of_an_undisturbed_run(
    tmp_path: Path, faults: str, cause: str
) -> None:
    flags = ["--hidden-dropout", "0.1", *ON_HOST]
    unbroken = losses(run_gpt(tmp_path / "unbroken", *flags, world_size=2))
    ended = train(tmp_path, faults, *FAST.split())
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert cause in said
    assert "restart 1 inside the processes" in said
    assert "successfully loaded checkpoint from" in said
    assert losses_of(tmp_path) == {i: {loss} for i, loss in enumerate(unbroken, 1)}


def test_without_a_reserve_left_the_run_ends_with_the_first_cause(tmp_path: Path) -> None:
    faults = "load.before:kill:rank1:start0,step.before:kill:rank0:step2:start1"
    ended = train(tmp_path, faults)
    assert ended.returncode != 0
    assert "rank 0 failed: its process" in ended.stderr
    assert "no reserve is left: 1 of 3 ranks live and --inprocess-active-world-size is 2" in (
        ended.stderr
    )


def left_after_a_run(rank: int, world_size: int, argv: list[str]) -> list[str]:
    train_gpt(rank, world_size, argv)
    gc.collect()
    return [type(o).__name__ for o in gc.get_objects() if isinstance(o, DataParallelBase)]


def test_a_run_leaves_no_model_in_the_process() -> None:
    assert run_ranks(left_after_a_run, 2, TINY) == [[], []]


@pytest.mark.skipif(
    not optional.available("nvidia_resiliency_ext.inprocess"),
    reason="nvidia-resiliency-ext is not installed",
)
def test_nvidias_wrapper_restarts_after_an_exception(tmp_path: Path) -> None:
    flags = ["--hidden-dropout", "0.1", *ON_HOST]
    unbroken = losses(run_gpt(tmp_path / "unbroken", *flags, world_size=2))
    times = "--inprocess-heartbeat-interval 1 --inprocess-heartbeat-timeout 20"
    faults = "step.before:raise:rank1:step5:start0"
    ended = train(tmp_path, faults, *times.split(), script="tests/functional/user_inprocess.py")
    assert ended.returncode == 0, ended.stderr
    assert "Interruption.EXCEPTION on ranks={1}" in ended.stderr
    assert losses_of(tmp_path) == {i: {loss} for i, loss in enumerate(unbroken, 1)}
