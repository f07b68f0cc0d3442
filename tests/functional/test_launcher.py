"""What a person sees who starts several ranks with torchrun."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.functional.runs import TINY
from tests.ranks import ROOT


@pytest.mark.feature("Errors: one report for all ranks, under torchrun too")
def test_all_ranks_together_report_the_conflicts_of_a_command_line_once() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "pretrain_gpt.py", *TINY, "--context-parallel-size", "3"]
    command += ["--pipeline-model-parallel-size", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    for problem in (
        "ConfigError: this run cannot start:",
        "3 ranks cannot be cut into replicas",
        "--seq-length 32 is not a multiple of 2 x --context-parallel-size 3",
    ):
        assert said.count(problem) == 1, said
    assert "ConfigError: this run cannot start (2 reasons, above)" in said
