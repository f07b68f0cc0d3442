"""Every program of the repository answers --help; modules that are no programs lie elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron.core import optional
from tests.repo.source import ROOT
from tests.support.ranks import run_ranks

FOLDERS = ("tools", "examples", "tasks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
# tools/dev/library_projects.py starts these in environments that have what they import.
FILES = [path for path in FILES if not path.match("tools/dev/lib/library_*.py")]
FILES += [path for path in sorted(ROOT.glob("*.py")) if path.name != "setup.py"]
IS_MODULE = {
    path: path.parent.name in ("lib", "data") or path.name == "common.py" for path in FILES
}
PROGRAMS = [str(path.relative_to(ROOT)) for path in FILES if not IS_MODULE[path]]


def help_of(rank: int, world_size: int, program: str) -> tuple[object, str]:
    """Return the status and the output of ``program --help``."""
    said = io.StringIO()
    path = ROOT / program
    status: object = 0
    with (
        mock.patch.object(sys, "argv", [str(path), "--help"]),
        mock.patch.object(sys, "path", [str(path.parent), str(ROOT), *sys.path]),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        os.environ.pop("RANK", None)
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
    return status, said.getvalue()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_explains_itself(program: str) -> None:
    ((status, said),) = run_ranks(help_of, 1, program)
    assert status == 0, said[-1000:]
    assert len(said) > 40, "it prints what it does"


@pytest.mark.parametrize("path", IS_MODULE, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_programs_are_told_apart(path: Path) -> None:
    assert ('__name__ == "__main__"' in path.read_text()) != IS_MODULE[path]


def test_help_of_lm_eval_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "available", lambda package: False)
    status, said = help_of(0, 1, "tools/run_lm_eval.py")
    assert status == 0
    assert 'pip install "lm-eval[api]"' in said
