"""What is wrong with the environment or a folder is reported before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.initialize import configure
from megatron.training.training import pretrain
from tests.support.command_lines import argv, problems_of

_LAUNCH = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
_TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str = "") -> str:
    for name in _LAUNCH:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        configure(argv=argv(words))
    return str(caught.value)


@pytest.mark.feature("Errors: a wrong launcher variable is named before anything starts")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "abc"}, "variable WORLD_SIZE='abc': a whole number of at least 1"),
        ({"WORLD_SIZE": "0"}, "variable WORLD_SIZE='0': a whole number of at least 1"),
        ({"RANK": "abc"}, "variable RANK='abc': a whole number of at least 0"),
        ({"RANK": "-1"}, "variable RANK='-1': a whole number of at least 0"),
        ({"LOCAL_RANK": "x"}, "variable LOCAL_RANK='x': a whole number of at least 0"),
        ({"LOCAL_WORLD_SIZE": "1.5"}, "variable LOCAL_WORLD_SIZE='1.5': a whole number"),
        ({**_TWO, "RANK": "2"}, "variable RANK=2, but WORLD_SIZE is 2: set RANK to a number"),
        (
            {**_TWO, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
            "variable LOCAL_RANK=1, but LOCAL_WORLD_SIZE is 1",
        ),
        ({**_TWO, "MASTER_PORT": "abc"}, "variable MASTER_PORT='abc': a port number from 1 to"),
        ({**_TWO, "MASTER_PORT": "99999"}, "variable MASTER_PORT='99999': a port number"),
        ({**_TWO, "MASTER_PORT": ""}, "WORLD_SIZE is 2, but MASTER_PORT is not set"),
        ({**_TWO, "MASTER_ADDR": ""}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
        ({"RANK": "0", "MASTER_ADDR": "a"}, "but WORLD_SIZE and MASTER_PORT are not set"),
    ],
)
def test_a_wrong_variable_of_the_launcher_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    text = refused(monkeypatch, variables)
    assert expected in text
    assert text.count("  - ") == 1


def test_the_environment_is_reported_together_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    text = refused(monkeypatch, {**_TWO, "MASTER_PORT": "99999"}, "--bf16 --fp16")
    assert "--bf16 and --fp16 exclude each other" in text
    assert "MASTER_PORT='99999'" in text


def test_a_rank_that_is_no_number_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *argv()])
    with pytest.raises(SystemExit) as ended:
        pretrain(None, None, None, None)  # type: ignore[arg-type]
    assert ended.value.code == 2
    assert "environment variable RANK='abc'" in capsys.readouterr().err


def test_a_plan_for_other_ranks_needs_no_rendezvous(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        configure(argv=argv("--check-only"))
    assert ended.value.code == 0
    assert "this run can start on 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        ("0", "--distributed-timeout-minutes 0: at least 1 is needed"),
        ("-3", "--distributed-timeout-minutes -3: at least 1 is needed"),
        ("99999999999999", "--distributed-timeout-minutes 99999999999999: at most 525600"),
    ],
)
def test_a_timeout_that_no_library_can_hold_is_refused(minutes: str, expected: str) -> None:
    (problem,) = problems_of(f"--distributed-timeout-minutes {minutes}")
    assert problem.startswith(expected)


@pytest.mark.parametrize("flag", ["--save", "--load", "--tensorboard-dir", "--data-path"])
def test_a_nul_character_in_a_file_of_flags_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(f'{{"{flag[2:].replace("-", "_")}": "a\\u0000b"}}')
    with pytest.raises(SystemExit) as ended:
        configure(argv=argv(f"--yaml-cfg {file} --use-checkpoint-args"))
    assert ended.value.code == 2
    assert f"{flag} 'a\\x00b': it holds a NUL character" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    text = refused(monkeypatch, {}, f"{flag} {tmp_path}/file/below")
    assert f"{flag} {tmp_path}/file/below: " in text
    assert "choose another folder" in text
    monkeypatch.setattr("os.access", lambda path, mode: False)
    text = refused(monkeypatch, {}, f"{flag} {tmp_path}/new")
    assert f"this user may not write into {tmp_path}" in text
