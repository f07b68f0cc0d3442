"""What a person sees when a rank of a generating program fails."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.ranks import ROOT
from tests.support.runs import run_gpt


@pytest.mark.feature("Generation: torchrun ends with the name of a killed rank")
def test_a_killed_rank_of_a_tool_is_named(tmp_path: Path) -> None:
    run_gpt(tmp_path / "run", "--train-iters", "1", "--save", str(tmp_path / "saved"))
    command = [*forked.torchrun(2), "tools/text_generation_cli.py", "--device", "cpu"]
    command += ["--load", str(tmp_path / "saved"), "--prompt", "5 6 7", "--num-tokens", "20"]
    command += ["--temperature", "0"]  # a sampled end of text may come before the fault
    said = {}
    for fault in ("", "inference.step:kill:rank1:step3"):
        ended = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "FAULTS": fault},
        )
        said[fault] = ended.stdout + ended.stderr
        assert (ended.returncode == 0) == (not fault), said[fault]
    assert "rank 1 failed" not in said[""]
    # The launcher may end rank 0 before its line is written; then its own report names rank 1.
    report = said["inference.step:kill:rank1:step3"]
    assert "rank 1 failed: its process" in report or re.search(
        r"rank +: 1 \(local_rank: 1\)", report
    )
