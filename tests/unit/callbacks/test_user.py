"""--callback MODULE:CLASS and pretrain(callbacks=[...]): what is found, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.callbacks import Callback, default
from megatron.training.callbacks.default import default_callbacks
from megatron.training.callbacks.user import (
    callback_problems,
    require_callbacks,
    user_callbacks,
)
from megatron.training.initialize import configure
from megatron.training.process.user_code import import_user_module
from tests.support.callback_calls import TINY_GPT, fake_run

MODULE = """
from megatron.training.callbacks import Callback

class Good(Callback):
    pass

class Thresholded(Callback):
    def __init__(self, threshold):
        self.threshold = threshold

class NoCallback:
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which holds users' modules."""
    (tmp_path / "users_callbacks.py").write_text(MODULE)
    (tmp_path / "broken_callbacks.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "incomplete_callbacks.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for name in ("users_callbacks", "broken_callbacks", "incomplete_callbacks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_class_of_the_working_directory_is_found() -> None:
    assert callback_problems(["users_callbacks:Good"]) == []
    (callback,) = user_callbacks(["users_callbacks:Good"])
    assert isinstance(callback, Callback)


@pytest.mark.parametrize(
    ("path", "reasons"),
    [
        ("no_such_module:Good", ["No module named 'no_such_module'", "PYTHONPATH"]),
        ("broken_callbacks:Good", ["ZeroDivisionError", "broken_callbacks.py:2"]),
        ("incomplete_callbacks:Good", ["ModuleNotFoundError", "no_such_package", "py:1"]),
        ("users_callbacks:Missing", ["defines no Missing", "users_callbacks.py"]),
        ("users_callbacks:NoCallback", ["not a subclass", "megatron.training.callbacks.Callback"]),
        ("users_callbacks:Thresholded", ["threshold", "pretrain(callbacks=[...])"]),
        ("users_callbacks", ["MODULE:NAME"]),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_the_reason(
    path: str, reasons: list[str]
) -> None:
    (problem,) = callback_problems([path])
    assert problem.startswith(f"--callback {path}: ") or problem.startswith("--callback ")
    assert [reason for reason in reasons if reason not in problem] == []


@pytest.mark.parametrize("check_only", [False, True])
def test_mistakes_are_reported_with_the_other_conflicts(
    check_only: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = f"{TINY_GPT} --callback users_callbacks:Good no_such_module:A users_callbacks:B".split()
    argv += ["--num-attention-heads", "5", *(["--check-only"] if check_only else [])]
    with pytest.raises((ConfigError, SystemExit)) as error:
        configure(argv=argv)
    text = capsys.readouterr().out if check_only else str(error.value)
    assert "no_such_module" in text
    assert "defines no B" in text
    assert "--num-attention-heads" in text


def test_callbacks_of_users_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default.dist, "get_rank", lambda: 0)
    run = fake_run("--callback users_callbacks:Good")
    names = [type(callback).__name__ for callback in default_callbacks(run)]
    assert names[-2:] == ["ExitConditions", "Good"]


def test_pretrain_takes_instances_only() -> None:
    require_callbacks([Callback()])
    with pytest.raises(ConfigError, match=r"holds <class .*: pass objects"):
        require_callbacks([Callback])


def test_a_module_that_ends_the_program_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_ends.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="--import-module module_that_ends: .* SystemExit at"):
        import_user_module("module_that_ends", "--import-module")
