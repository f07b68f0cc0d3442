"""What a person sees who starts several ranks with torchrun."""

from __future__ import annotations

import subprocess

import pytest

from tests.support import forked
from tests.support.ranks import ROOT
from tests.support.runs import TINY

CONFLICTS = {
    "--tensor-model-parallel-size 3": "--num-attention-heads 4 cannot be split over",
    "--context-parallel-size 3": "--seq-length 32 is not a multiple of 2 x --context-parallel-",
    "--pipeline-model-parallel-size 2": "3 ranks cannot be divided into",
    "--pipeline-model-parallel-layout Et|L": "has 1 E, 1 t, 0 m, 1 L: write one E",
    "--use-torch-fsdp2 --pipeline-schedule zb-h1": "--use-torch-fsdp2 reduces weight gradients",
    "--ffn-hidden-size 96": "ConfigError: this run cannot start:",  # the report itself
}


@pytest.mark.feature("Errors: one report for all ranks, under torchrun too")
def test_all_ranks_together_report_the_conflicts_of_a_command_line_once() -> None:
    command = [*forked.torchrun(3), "pretrain_gpt.py", *TINY, *" ".join(CONFLICTS).split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    for problem in CONFLICTS.values():
        assert said.count(problem) == 1, said
    assert "ConfigError: this run cannot start (5 reasons, printed above)" in said
