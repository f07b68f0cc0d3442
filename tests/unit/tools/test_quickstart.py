"""The quickstart: its commands are ones the programs take, and its yardstick is right."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.quickstart import corpus, unigram
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from tests.support.runs import ROOT, defaults_of
from tools import preprocess_data, text_generation_cli, train_tokenizer

# Stands in for python: notes what it is asked to run, a line a command.
RECORDER = """#!{python}
import json, sys
with open({record!r}, "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")
"""


FOLDERS = {"quickstart.sh": "gpt", "multimodal": "vlm"}  # the others have the name of a kind
WAYS = {  # what each trains
    FOLDERS.get(part := script.relative_to(ROOT / "examples").parts[0], part): script
    for script in ROOT.glob("examples/**/quickstart.sh")
}


# Steps before training, each of which is repeated only if it has not finished.
ONCE = {
    "examples/quickstart/corpus.py", "tools/train_tokenizer.py", "tools/preprocess_data.py"
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(WAYS))
def kind(request: pytest.FixtureRequest) -> str:
    """Of model."""
    return str(request.param)


@pytest.fixture(scope="module")
def commands(kind: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the script runs, in order."""
    return recorded(kind, tmp_path_factory.mktemp("quickstart"))


def recorded(kind: str, folder: Path, **variables: str) -> list[list[str]]:
    """The commands of the script of ``kind`` with environment ``variables``."""
    record, recorder = folder / "record", folder / "python"
    recorder.write_text(RECORDER.format(python=sys.executable, record=str(record)))
    recorder.chmod(0o755)
    env = {**os.environ, "PYTHON": str(recorder), **variables}
    script = ["bash", str(WAYS[kind]), str(folder / "out")]
    subprocess.run(script, check=True, env=env, capture_output=True)
    return [json.loads(line) for line in record.read_text().splitlines()]


def words_of(commands: list[list[str]], program: str) -> list[list[str]]:
    return [words[1:] for words in commands if words[0] == program]


@pytest.mark.parametrize("iterations", ["4", "20"])
def test_a_few_iterations_can_be_asked_for(iterations: str, tmp_path: Path):
    first, _ = words_of(recorded("gpt", tmp_path, TRAIN_ITERS=iterations), "pretrain_gpt.py")
    resolve(parse_args(argv=first, args_defaults=defaults_of("pretrain_gpt.py")), 1)


def test_it_trains_halfway_and_goes_on_with_the_same_command(commands, kind):
    first, second = words_of(commands, f"pretrain_{kind}.py")
    assert first == [*second, "--exit-interval", first[-1]]
    parsed = parse_args(argv=first, args_defaults=defaults_of(f"pretrain_{kind}.py"))
    assert parsed.exit_interval * 2 == parsed.train_iters
    assert parsed.save == parsed.load
    run = resolve(parsed, 1)
    assert run.training.train_iters == parsed.train_iters
    assert [w for w in run.warnings if "without effect" in w] == []
    if kind == "vlm":
        ((_, shard, _, least),) = words_of(commands, "examples/multimodal/quickstart/look.py")
        assert shard in second
        assert 0 < float(least) < 1
        return
    (compared,) = words_of(commands, "examples/quickstart/unigram.py")
    assert float(compared[1]) > 0
    assert compared[2:] == ["--model-kind", kind, *second]


def test_every_tool_it_calls_takes_its_flags(commands):
    for words in words_of(commands, "tools/preprocess_data.py"):
        preprocess_data.get_parser().parse_args(words)
    for words in words_of(commands, "tools/train_tokenizer.py"):
        train_tokenizer.get_parser().parse_args(words)
    for words in words_of(commands, "tools/text_generation_cli.py"):
        text_generation_cli.build_parser().parse_args(words)


def test_every_program_it_calls_exists(commands):
    assert all((ROOT / words[0]).exists() for words in commands)


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    script = ["bash", str(ROOT / "examples/quickstart.sh"), str(tmp_path)]
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "exists and was not made by this script" in done.stderr
    assert (tmp_path / "mine").exists()


def test_a_second_run_repeats_no_step_that_has_finished(tmp_path):
    first = recorded("gpt", tmp_path)
    both = recorded("gpt", tmp_path)
    second = both[len(first) :]
    assert second == [words for words in first if words[0] not in ONCE]
    assert {words[0] for words in first} - {words[0] for words in second} == ONCE


def test_no_example_deletes_anything():
    for script in ROOT.glob("examples/**/*.sh"):
        assert not re.search(r"\brm\b", script.read_text()), script


def test_the_corpus_parts_share_no_file(tmp_path, monkeypatch):
    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    for i in range(45):
        (library / f"m{i}.py").write_text(f"number = {i}\n")
    (library / "test" / "left_out.py").write_text("x = 1\n")
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.setattr(sys, "argv", ["corpus.py", str(tmp_path / "out")])
    assert corpus.main() == 0
    parts = [
        {json.loads(line)["text"] for line in (tmp_path / "out" / name).read_text().splitlines()}
        for name in ("train.jsonl", "valid.jsonl")
    ]
    assert len(parts[0]) == 42
    assert len(parts[1]) == 3
    assert not parts[0] & parts[1]


def test_the_unigram_loss_is_the_cross_entropy_of_counts_plus_one():
    train, valid = np.array([0, 0, 1]), np.array([0, 1, 2])
    expected = -(math.log(3 / 6) + math.log(2 / 6) + math.log(1 / 6)) / 3
    assert unigram.unigram_loss(train, valid) == pytest.approx(expected)


def test_the_last_validation_line_of_a_log_counts():
    line = " validation loss at iteration {} | lm loss value: {} | lm loss PPL: 1.0E+00 | \n"
    log = line.format(10, "5.5E+00") + "---\n" + line.format("20 on validation set", "4.25E+00")
    assert unigram.last_validation_losses(log) == {"lm": 4.25}
    both = log + line.format(30, "3.5E+00 | sop loss value: 6.5E-01")
    assert unigram.last_validation_losses(both) == {"lm": 3.5, "sop": 0.65}


def test_only_labels_that_count_are_counted():
    samples = [
        {"labels": np.array([3, 4, -1]), "loss_mask": np.array([1.0, 1.0, 0.0])},
        {"labels": np.array([5, 6]), "loss_mask": np.array([0, 1])},
    ]
    assert unigram.asked_for(samples).tolist() == [3, 4, 6]
