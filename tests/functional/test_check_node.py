"""tools/check_node.py names the faulty device or disk, in bounded time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.repo.source import ROOT
from tests.support import forked

TOOL = [str(ROOT / "tools/check_node.py"), "--device", "cpu", "--disk-mib", "1"]


def start(*flags: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [forked.python(), *TOOL, *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.feature("Running: a faulty device or disk is named before a run (tools/check_node.py)")
def test_the_unhealthy_ranks_are_named(tmp_path: Path) -> None:
    """Of three ranks, 0 is healthy, 1 computes wrong results, and the disk of 2 hangs."""
    faults = "check.matmul:bitflip:rank1,check.disk:hang:rank2"
    flags = "--folder", str(tmp_path), "--limit-s", "6"
    ranks = [start(*flags, RANK=str(rank), WORLD_SIZE="3", FAULTS=faults) for rank in range(3)]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 1, 1], outputs
    assert outputs[0].endswith(", rank 0: healthy\n")
    wrong = "ArithmeticError: the product of two matrices is wrong: the device is faulty"
    assert outputs[1].endswith(f", rank 1: matmul: {wrong}\n")
    assert outputs[2].endswith(", rank 2: disk: no result within 6 s\n")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--folder", "/missing"], "--folder /missing: it is not a folder on this host"),
        (["--limit-s", "0"], "--limit-s and --disk-mib must be positive"),
    ],
)
def test_wrong_arguments_have_their_own_status(flags: list[str], why: str) -> None:
    with start(*flags) as tool:
        _, error = tool.communicate()
    assert why in error
    assert tool.returncode == 2
