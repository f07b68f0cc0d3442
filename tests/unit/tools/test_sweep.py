"""tools/sweep.py: which runs it starts, what it starts again, and its table."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from tests.repo.source import ROOT
from tests.support import forked
from tests.support.pages import blocks_of
from tools import sweep

pytest.importorskip("yaml")

# Writes the metrics of a run whose loss is --lr; an lr of 0 fails until the file `cured` exists.
PROGRAM = """
import json, os, sys
words = sys.argv[1:]
lr = float(words[words.index("--lr") + 1])
if lr == 0 and not os.path.exists("cured"):
    print("step 1")
    sys.exit("ValueError: the learning rate is 0")
with open(words[words.index("--metrics-file") + 1], "a") as file:
    json.dump({"kind": "step", "iteration": 1, "lm loss": 9, "words": 0}, file)
    file.write("\\n")
    json.dump({"kind": "validation", "iteration": 1, "lm loss validation": lr}, file)
open("started", "a").write(f"{lr} {os.environ.get('CUDA_VISIBLE_DEVICES')}\\n")
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def test_all_combinations_of_the_grid_with_each_run_of_the_list(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "command: python pretrain_gpt.py --save-interval 2\nfolder: out\n"
        "grid: {lr: [1e-3, 0.25], tensor_model_parallel_size: [1, 2]}\n"
        "runs: [{bf16: true, split: [9, 1]}, {wandb_exp_name: a b, bf16: false}]\n",
    )
    runs, metrics = sweep.read_sweep(path)
    assert metrics == sweep.METRICS
    assert len(runs) == 8
    name = "bf16=True,split=9_1,lr=1e-3,tensor_model_parallel_size=1"
    folder = f"out/{name}"
    assert runs[0].name == name
    assert runs[0].command == (
        *(sys.executable, "pretrain_gpt.py", "--save-interval", "2", "--bf16", "--split", "9", "1"),
        *("--lr", "1e-3", "--tensor-model-parallel-size", "1"),
        *("--metrics-file", f"{folder}/metrics.jsonl"),
        *("--save", f"{folder}/checkpoints", "--load", f"{folder}/checkpoints"),
    )
    assert "--bf16" not in runs[-1].command
    at = runs[-1].command.index("--wandb-exp-name")
    assert runs[-1].command[at + 1] == "a b", "a text is one word"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("command: a\n", "must have command and folder"),
        ("command: a\nfolder: b\ngird: {}\n", "it has command, folder, gird"),
        ("- a\n", "must have command and folder"),
        ("command: a\nfolder: b\ngrid: {lr: 1}\n", "lr of grid has 1 in place of a list"),
        ("command: a\nfolder: b\nruns: [lr]\n", "runs has 'lr' in place of flags with values"),
        ("command: a\nfolder: b\ngrid: {lr: [1, 1]}\n", "the same run twice"),
        ("command: [", "cannot be read"),
        ("command: a 'b\nfolder: b\n", "split into words: No closing quotation"),
        ("command:\nfolder: b\n", "command is empty"),
        ("command: a\nfolder: b\ngrid: 5\n", "grid must have flags"),
        ("command: a\nfolder: b\nruns: {lr: 5}\n", "runs be a list"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep.read_sweep(write(tmp_path, text))


@pytest.mark.feature("Sweeps: tools/sweep.py runs a grid of flags, resumes it and tabulates losses")
def test_a_sweep_ends_with_a_table_and_repeats_only_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    path = write(
        tmp_path, "command: python -S program.py\nfolder: out\ngrid: {lr: [3.0, 0, 2.0]}\n"
    )
    assert sweep.main([str(path), "--jobs", "2", "--gpus-per-run", "2"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "lr=0: failed: ValueError: the learning rate is 0" in said
    rows = [line.split("  ")[0].strip() for line in said[-4:]]
    assert rows == ["run", "lr=2.0", "lr=3.0", "lr=0"]
    assert "2.0000" in said[-3]
    assert said[-3].endswith("done")
    assert said[-1].endswith("ValueError: the learning rate is 0")
    started = Path("started").read_text().splitlines()
    assert {line.split()[1] for line in started} <= {"0,1", "2,3"}

    assert sweep.main([str(path), "--print"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert shlex.split(line)[-2:] == ["--only", "lr=0"]
    Path("cured").touch()
    done = subprocess.run([forked.python(), *shlex.split(line)[1:]])
    assert done.returncode == 0
    assert len(Path("started").read_text().splitlines()) == 3
    assert json.loads(Path("out/lr=0/status.json").read_text())["code"] == 0
    assert sweep.main([str(path), "--table"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("lr=0")


def test_a_program_that_is_missing_fails_its_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "command: ./none.py\nfolder: out\ngrid: {lr: [1, 2]}\n")
    assert sweep.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert said.count("failed: error: ./none.py: No such file or directory") == 2
    for flags in (["--jobs", "0"], ["--gpus-per-run", "-1"]):
        with pytest.raises(SystemExit):
            sweep.main([str(path), *flags])


def test_an_unknown_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "command: a\nfolder: b\n")
    with pytest.raises(SystemExit):
        sweep.main([str(path), "--only", "x"])
    assert "has no such run" in capsys.readouterr().err


def test_the_sweep_of_the_page_has_runs_that_can_start(tmp_path: Path) -> None:
    (block,) = [b.code for b in blocks_of(ROOT / "docs/tracking.md") if b.language == "yaml"]
    runs, _ = sweep.read_sweep(write(tmp_path, block))
    assert len(runs) == 4
    for run in runs:
        assert run.command[:2] == (sys.executable, "pretrain_gpt.py")
        resolve(parse_args(argv=list(run.command[2:])), 1)
