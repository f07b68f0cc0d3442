"""A rank ends with the launcher that started it, and says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.repo.source import ROOT

# A launcher that starts a rank, waits until it is up, and dies; the rank waits for its input.
_LAUNCHER = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
os.kill(os.getpid(), 9)
"""
_RANK = """
import sys
import megatron.training.process.early_sigterm
print("up", flush=True)
sys.stdin.read()
print("ended in order", file=sys.stderr)
"""


def _launch(**environ: str) -> subprocess.Popen[str]:
    known = {name: value for name, value in os.environ.items() if "ELASTIC" not in name}
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _RANK],
        cwd=ROOT,
        env={**known, **environ},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.feature("Running: ranks end when their launcher is killed")
def test_a_rank_ends_with_the_launcher_that_started_it() -> None:
    launched = _launch(TORCHELASTIC_RUN_ID="x", RANK="3")
    assert launched.stdin is not None
    assert launched.stderr is not None
    said = launched.stderr.read()  # returns when the rank, too, has ended
    launched.stdin.close()
    launcher = launched.pid
    assert said == f"rank 3 ends: its launcher, process {launcher}, has ended\n"


def test_a_process_without_a_launcher_outlives_its_parent() -> None:
    launched = _launch()
    launched.wait()
    _, said = launched.communicate("")
    assert said == "ended in order\n"
