"""tools/gpu_lease.py: commands with time limits, and a table of what they found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import gpu_lease
from tools.gpu_lease import LOSSES, REFERENCE, Command, run_stage, table_of

PRINT = [sys.executable, "-c", "print('lm loss: 6.5 |'); print('lm loss: 6.25 |')"]
HANG = [sys.executable, "-c", "import time; print('started', flush=True); time.sleep(600)"]
FAIL = [sys.executable, "-c", "raise SystemExit(3)"]


@pytest.mark.feature("Platforms: a script tests and measures on a GPU that is lent for minutes")
def test_a_stage_runs_each_command_within_its_limit(tmp_path: Path) -> None:
    rows = run_stage(
        [
            Command("close", PRINT, 60, gpu_lease._comparison("gpt2", [6.5, 6.2501])),
            Command("hangs", HANG, 0.5),
            Command("fails", FAIL, 60),
        ],
        tmp_path / "log",
    )
    assert [row.result for row in rows] == [
        "ok: relative difference 1.6e-05",
        "failed: not finished in 0 s",
        "failed with exit code 3",
    ]
    assert table_of(rows)[2].startswith("| close | ok: relative difference 1.6e-05 | ")
    assert "lm loss: 6.5" in (tmp_path / "log").read_text()


def test_a_command_without_time_ends_with_its_children(tmp_path: Path) -> None:
    """Ranks of torchrun would keep the GPU's memory, and the pipe of the output."""
    child = tmp_path / "pid"
    words = ["sh", "-c", f"sh -c 'echo $$ >{child}; exec sleep 600'; true"]
    (row,) = run_stage([Command("ranks", words, 1)], tmp_path / "log")
    assert row.result == "failed: not finished in 1 s"
    of_child = Path("/proc") / child.read_text().strip() / "cmdline"
    assert not (of_child.exists() and of_child.read_bytes()), "it has ended, or is a zombie"


def test_the_row_of_a_speed_has_the_rates_of_all_contenders() -> None:
    output = """124m: 12 layers

| contender | tokens/s | TFLOP/s | of the peak | of the product | ours / it | peak GiB | loss gap |
|---|---|---|---|---|---|---|---|
| ours | 2,149 | 0.0018 | nan% | 60.4% | 1.000 | 0.27 | 0.000% |
| torchtitan | 2,000 | 0.0017 | nan% | 55.0% | 1.075 | 0.29 | 0.001% |
"""
    assert gpu_lease._rates(output) == (
        "ok: ours 2,149 tokens/s (60.4% of a matmul), torchtitan 2,000 tokens/s (55.0% of a matmul)"
    )
    assert gpu_lease._rates("nothing") == "failed: no row of a contender"


def test_a_command_that_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    (row,) = run_stage([Command("late", PRINT, 60)], tmp_path / "log", stage_s=0)
    assert row.result == "skipped: no time is left"


def test_losses_that_differ_or_are_missing_are_failures() -> None:
    output = "iteration 1 | lm loss: 6.5 | x\niteration 2 | lm loss: NAN | x\n"
    assert gpu_lease._compare(output, [6.5, 6.25], "gpt2").startswith("failed: relative")
    assert gpu_lease._compare(output, [6.5], "gpt2") == "failed: 2 losses, not 1"
    assert gpu_lease._compare(output, None, "gpt2").startswith("failed: no losses of a CPU")


def test_each_flag_set_has_losses_of_a_cpu() -> None:
    known = json.loads(REFERENCE.read_text())
    assert known.keys() == LOSSES.keys()
    assert all(len(values) == 3 for values in known.values())
