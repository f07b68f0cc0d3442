"""A rank writes why it ends, once, into the folder that the supervisor names."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.core import virtual_ranks
from megatron.core.config.errors import (
    CheckpointDamaged,
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    MissingDependency,
)
from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.training.process import exit_report
from tests.support import forked
from tests.support.ranks import ROOT
from tests.support.runs import TINY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRON_EXIT_REPORT_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(exit_report, "_noted", {})
    monkeypatch.setattr(exit_report, "_suspects", [])
    return tmp_path


def read(folder: Path, rank: int = 3) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / f"rank_{rank}.json").read_text())
    return report


def test_the_report_has_the_notes_and_the_suspects(folder: Path) -> None:
    exit_report.note(iteration=7, loaded_iteration=4, loaded_from="/c/iter_0000004")
    exit_report.note(saved_iteration=6)
    exit_report.blame(1, "its weights differ", device="cuda:1")
    exit_report.write("failed", 1, "rank 1 failed: ReplicasDiffer: weights differ")
    report = read(folder)
    assert (report["rank"], report["pid"], report["code"]) == (3, os.getpid(), 1)
    assert (report["iteration"], report["saved_iteration"]) == (7, 6)
    assert (report["loaded_iteration"], report["loaded_from"]) == (4, "/c/iter_0000004")
    assert report["caused_by"] == 1
    (suspect,) = report["suspects"]
    assert (suspect["rank"], suspect["why"]) == (1, "its weights differ")
    assert os.listdir(folder) == ["rank_3.json"], "no draft is left"


def test_the_first_report_of_a_process_is_kept(folder: Path) -> None:
    exit_report.write("rerun", 16, "restart to disambiguate")
    exit_report.write_error(SystemExit(16))
    assert read(folder)["reason"] == "restart to disambiguate"


def test_nothing_is_written_without_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_EXIT_REPORT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    exit_report.write("done", 0)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_harms_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_EXIT_REPORT_DIR", str(folder / "absent"))
    exit_report.write("done", 0)


def test_virtual_ranks_have_their_own_notes() -> None:
    def live(rank: int, world_size: int) -> dict[str, Any]:
        exit_report.note(iteration=rank)
        return exit_report._noted

    assert virtual_ranks.run(live, 2) == [{"iteration": 0}, {"iteration": 1}]


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (ConfigError("x"), 2, "user_error"),
        (MissingDependency("x"), 2, "user_error"),
        (CheckpointError("--load x holds no checkpoint"), 2, "user_error"),
        (CheckpointDamaged("x"), 65, "failed"),
        (DataError("x"), 65, "failed"),
        (SaveFailed("x"), 1, "failed"),
        (LaunchError("x"), 1, "failed"),
        (ValueError("x"), 1, "failed"),
        (SystemExit(17), 17, "rerun"),
        (SystemExit("message"), 1, "failed"),
        (SystemExit(), 0, "done"),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    folder: Path, error: BaseException, code: int, kind: str
) -> None:
    exit_report.write_error(error)
    report = read(folder)
    assert (report["code"], report["kind"]) == (code, kind)


def _run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [forked.python(), "pretrain_gpt.py", *TINY, *flags]
    environ = {**os.environ, "MEGATRON_EXIT_REPORT_DIR": str(folder), "RANK": ""}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


@pytest.mark.feature("Running: exit status 2 and one message for an error of the user")
def test_a_refused_command_line_ends_with_2_and_a_report(tmp_path: Path) -> None:
    ended = _run(tmp_path, "--tensor-model-parallel-size", "3")
    assert ended.returncode == 2, ended.stderr
    report = read(tmp_path, 0)
    assert (report["kind"], report["code"]) == ("user_error", 2)
    assert report["reason"].startswith("ConfigError: this run cannot start:")


def test_a_run_reports_that_it_is_done_and_what_it_saved(tmp_path: Path) -> None:
    ended = _run(tmp_path, "--save", str(tmp_path / "c"), "--exit-interval", "2")
    assert ended.returncode == 0, ended.stderr
    report = read(tmp_path, 0)
    assert (report["kind"], report["iteration"], report["saved_iteration"]) == ("stopped", 2, 2)
