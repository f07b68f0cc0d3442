"""tools/dev/gpu_lease.py: commands with time limits, and a table of what they found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.dev import gpu_lease
from tools.dev.lib.timed_commands import Command, run_stage, table_of

PRINT = [sys.executable, "-c", "print('lm loss: 6.5 |'); print('lm loss: 6.25 |')"]
HANG = [sys.executable, "-c", "import time; print('started', flush=True); time.sleep(600)"]
FAIL = [sys.executable, "-c", "print('ValueError: of | this'); raise SystemExit(3)"]


@pytest.mark.feature("Platforms: a script tests and measures on a GPU that is lent for minutes")
def test_a_stage_runs_each_command_within_its_limit(tmp_path: Path) -> None:
    rows = run_stage(
        [
            Command("prints", PRINT, 60, lambda output: f"ok: {len(output)} characters"),
            Command("hangs", HANG, 0.5),
            Command("fails", FAIL, 60),
        ],
        tmp_path / "log",
        stage_s=60,
    )
    assert [row.result for row in rows] == [
        "ok: 31 characters",
        "failed: not finished in 0 s",
        "failed with exit code 3: ValueError: of | this",
    ]
    assert table_of(rows)[2].startswith("| prints | ok: 31 characters | ")
    assert "ValueError: of / this" in table_of(rows)[4], "no further column"
    assert "lm loss: 6.5" in (tmp_path / "log").read_text()


def test_a_command_without_time_ends_with_its_descendants(tmp_path: Path) -> None:
    """Ranks of torchrun have sessions of their own, and would keep the GPU's memory."""
    child = tmp_path / "pid"
    words = ["sh", "-c", f"setsid sh -c 'echo $$ >{child}; exec sleep 600'; true"]
    (row,) = run_stage([Command("ranks", words, 1)], tmp_path / "log", stage_s=60)
    assert row.result == "failed: not finished in 1 s"
    of_child = Path("/proc") / child.read_text().strip() / "cmdline"
    assert not (of_child.exists() and of_child.read_bytes()), "it has ended, or is a zombie"


def test_a_process_that_outlives_its_command_is_not_waited_for(tmp_path: Path) -> None:
    words = ["sh", "-c", "setsid sleep 30 & echo done"]
    (row,) = run_stage([Command("left", words, 20, lambda out: out)], tmp_path / "log", stage_s=60)
    assert row.result == "done\n"


def test_what_a_command_had_found_before_its_limit_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    hangs = Command("hangs", HANG, 6, lambda output: f"ok: {output.split()[0]}")
    (row,) = run_stage([hangs], tmp_path / "log", stage_s=60)
    assert row.result == "failed: not finished in 6 s; before: started"
    assert "most recent call first" in (tmp_path / "log").read_text(), "where it hung"


def test_rows_of_commands_that_run_together_keep_their_order(tmp_path: Path) -> None:
    wait = f"while ! test -e {tmp_path}/made; do sleep 0.01; done"
    commands = [
        Command("waits", ["sh", "-c", wait], 60),
        Command("makes", ["touch", f"{tmp_path}/made"], 60),
    ]
    rows = run_stage(commands, tmp_path / "log", stage_s=60, workers=2)
    assert [(row.name, row.result) for row in rows] == [("waits", "ok"), ("makes", "ok")]


HEAD = "| contender | tokens/s | TFLOP/s | peak | product | ours / it | GiB | loss gap |"
OURS = "| ours | 2,149 | 0.0018 | nan% | 60.4% | 1.000 | 0.27 | 0.000% |"


def test_tables_of_a_command_are_printed_with_their_titles(tmp_path: Path) -> None:
    printed = f"a log line\n124m: {OURS}\n\n124m: 12 layers\n\n{HEAD}\n|---|\n{OURS}\nmoe\n{HEAD}\n"
    words = [sys.executable, "-c", f"print({printed!r})"]
    command = Command("speed", words, 60, gpu_lease._rates, has_tables=True)
    rows = run_stage([command], tmp_path / "log", stage_s=60)
    tables, *rest = table_of(rows)
    assert tables.splitlines() == [
        *("124m: 12 layers", "", HEAD, "|---|", OURS),
        *("", "moe", "", HEAD),
    ]
    assert rest[2].startswith("| speed | ok: 1 rows | ")


def test_a_contender_that_was_not_measured_or_trains_something_else_is_a_failure() -> None:
    assert gpu_lease._rates(f"124m: {OURS}\n") == "ok: 1 rows"
    late = "1.3b: | hf | not finished in 90 s | | | | | | |\n"
    assert gpu_lease._rates(f"{OURS}\n{late}") == "failed: 1.3b: hf: not finished in 90 s"
    void = "moe: " + OURS.replace("0.000%", "2.000% VOID")
    assert gpu_lease._rates(void) == "failed: moe: ours: loss gap 2.000% VOID"
    assert gpu_lease._rates("nothing") == "failed: no row of a contender"


def test_a_judge_that_fails_costs_only_its_row(tmp_path: Path) -> None:
    rows = run_stage(
        [Command("first", PRINT, 60, lambda output: output[99]), Command("second", PRINT, 60)],
        tmp_path / "log",
        stage_s=60,
    )
    assert rows[0].result.startswith("failed: its output cannot be judged (IndexError: ")
    assert rows[1].result == "ok"


def test_a_command_that_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    (row,) = run_stage([Command("late", PRINT, 60)], tmp_path / "log", stage_s=0)
    assert row.result == "skipped: no time is left"


def test_a_machine_without_a_gpu_and_tests_that_skip_are_failures() -> None:
    assert gpu_lease._gpu("missing: x\nno GPU 0 GiB\n") == "failed: no GPU 0 GiB"
    assert gpu_lease._gpu("NVIDIA H100 79 GiB\n") == "ok: NVIDIA H100 79 GiB"
    assert gpu_lease._some_passed("== 238 skipped in 3s ==\n") == "failed: 238 skipped in 3s"
    assert gpu_lease._some_passed("== 1 passed in 3s ==\n") == "ok: 1 passed in 3s"
