"""Runs under torchrun that NVIDIA's wrapper restarts inside their processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core import optional
from megatron.core.distributed.data_parallel_base import DataParallelBase
from tests.support.ranks import ROOT, run_ranks
from tests.support.runs import ON_HOST, TINY, losses, run_gpt, train_gpt

RESTART = "--inprocess-restart --inprocess-granularity rank --inprocess-active-world-size 2"
FLAGS = "--hidden-dropout 0.1 --save-interval 2 --inprocess-last-call-wait 0.2"
# No forked process: the package may lie in a folder of PYTHONPATH.
TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 3".split()]
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
TIMES = "--inprocess-heartbeat-interval 1 --inprocess-heartbeat-timeout 20"


def train(folder: Path, faults: str, script: str) -> subprocess.CompletedProcess[str]:
    """Train with two active ranks and one reserve."""
    command = [*TORCHRUN, script, *TINY, *RESTART.split(), *FLAGS.split(), *TIMES.split()]
    command += ["--metrics-file", str(folder / "metrics.jsonl"), "--save", str(folder / "ck")]
    environment = {**os.environ, "FAULTS": faults, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}
    return subprocess.run(
        command,
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


@pytest.mark.feature("Faults: NVIDIA's wrapper restarts a run inside its processes")
@pytest.mark.skipif(
    not optional.available("nvidia_resiliency_ext.inprocess"),
    reason="nvidia-resiliency-ext is not installed",
)
@pytest.mark.parametrize(
    ("faults", "script"),
    [
        ("step.before:raise:rank1:step5:start0", "pretrain_gpt.py"),
        ("evaluate.iter:raise:rank1:start0", "tests/support/user_inprocess.py"),
    ],
)
def test_losses_after_a_fault_are_those_of_an_undisturbed_run(
    tmp_path: Path, faults: str, script: str
) -> None:
    flags = ["--hidden-dropout", "0.1", *ON_HOST]
    unbroken = losses(run_gpt(tmp_path / "unbroken", *flags, world_size=2))
    ended = train(tmp_path, faults, script)
    assert ended.returncode == 0, ended.stderr
    assert "Interruption.EXCEPTION on ranks={1}" in ended.stderr
    assert "successfully loaded checkpoint from" in ended.stdout
    assert losses_of(tmp_path) == {i: {loss} for i, loss in enumerate(unbroken, 1)}


def left_after_a_run(rank: int, world_size: int, argv: list[str]) -> list[str]:
    train_gpt(rank, world_size, argv)
    gc.collect()
    return [type(o).__name__ for o in gc.get_objects() if isinstance(o, DataParallelBase)]


def test_a_run_leaves_no_model_in_the_process() -> None:
    assert run_ranks(left_after_a_run, 2, TINY) == [[], []]
