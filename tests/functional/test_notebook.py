"""The notebook runs from its first cell to its last, and programs take its command lines."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.functional.test_code_of_pages import problems_of
from tests.repo.source import ROOT
from tests.support.ranks import run_ranks

NOTEBOOK = ROOT / "examples" / "quickstart" / "first_run.ipynb"


def cells() -> list[str]:
    """The cells with code, in their order."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in found), "clear the outputs before a commit"
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def as_python(cell: str) -> str:
    """Return a cell in which shell commands, with names of Python in braces, are calls."""
    return re.sub(r"^!(.*)$", lambda m: f"shell(f{m[1]!r})", cell, flags=re.MULTILINE)


def test_programs_take_the_command_lines_of_the_notebook() -> None:
    lines: list[list[str]] = []
    names = {"shell": lambda line: lines.append(shlex.split(line))}
    for cell in cells():
        if "import" not in cell:
            exec(as_python(cell), names)
    assert len(lines) == 5
    assert "--exit-interval" in lines[3]
    (problems,) = run_ranks(problems_of, 1, lines)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("matplotlib")
    for name in ("examples", "tools", "megatron", "pretrain_gpt.py", "megatron_commands.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": tmp_path}}
    ).execute()
    said = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "image/png" in said
    assert "def main(" in said
