"""Console commands start the programs, from a checkout and from what a wheel has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import megatron_commands as commands
from megatron.training.arguments.programs import path_of
from megatron.training.fault_tolerance.launch_flags import parse
from tests.repo.source import ROOT
from tests.support import forked
from tools import launch

TRAIN = "from megatron_commands import train; train()"
TINY = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-layers 1 --hidden-size 16
    --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2
    --lr 1e-3 --train-iters 2 --eval-iters 0 --log-interval 1
""".split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True)
    return folder


def run(
    *words: str, folder: Path | None = None, code: str = TRAIN, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(folder or ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd)


def test_a_wheel_trains_outside_of_the_checkout(wheel, tmp_path):
    ended = run("gpt", *TINY, folder=wheel, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "iteration        2/       2" in ended.stdout


def test_a_wheel_has_the_tools(wheel, tmp_path):
    # A tool that imports no torch.
    name = "megatron-preprocess"
    code = f"import sys; sys.argv[0] = '{name}'; from megatron_commands import tool; tool()"
    ended = run("--help", folder=wheel, code=code, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("usage: ")


def test_a_wheel_has_the_recipes(wheel, tmp_path):
    ended = run("recipes", folder=wheel, cwd=tmp_path)
    assert re.search(r"^sft-lora +Fine-tune by LoRA: ", ended.stdout, re.MULTILINE)
    ended = run("--config", "sft-lora", "--load", "none", folder=wheel, cwd=tmp_path)
    folder = wheel / "megatron" / "programs" / "examples" / "recipes"
    assert (folder / "data" / "chats.jsonl").is_file()
    assert f"> {folder / 'sft-lora.yaml'}: --lora-rank 16" in ended.stdout


def test_every_command_starts_a_program_of_the_checkout():
    files = [program.file for program in commands.PROGRAMS.values()]
    assert all(path_of(file).is_file() for file in [*files, *commands.TOOLS.values()])
    scripts = (ROOT / "pyproject.toml").read_text().split("[project.scripts]\n")[1].split("\n\n")[0]
    assert {line.split(" = ")[0] for line in scripts.splitlines()} == {
        "megatron-train",
        *commands.TOOLS,
    }


def test_an_objective_has_its_flag_before_those_of_the_user():
    words = commands.command_line(["dpo", "--dpo-beta", "0.3"])
    assert words == [str(ROOT / "pretrain_gpt.py"), "--dpo-beta", "0.1", "--dpo-beta", "0.3"]


def test_a_file_names_the_program_and_keeps_its_values(tmp_path):
    file = tmp_path / "run.yaml"
    flags = ["--lr", "1", f"--config={file}"]
    split = ["--lr", "1", "--config", str(file)]
    file.write_text("lr: 1\ntrain: dpo # preferences\n")
    assert commands.command_line(flags) == [str(ROOT / "pretrain_gpt.py"), *split]
    assert commands.command_line(["dpo", *flags]) == [str(ROOT / "pretrain_gpt.py"), *split]
    file.write_text('{\n "dpo_beta": 0.3,\n "train": null}')
    assert commands.command_line(["dpo", *flags]) == [str(ROOT / "pretrain_gpt.py"), *split]
    assert commands.command_line(["sft", *flags])[1] == "--sft"
    file.write_text("train: rl\n")
    assert commands.command_line(flags) == [str(ROOT / "pretrain_rl.py"), *split]
    script = ["train.py", "--config", "of-the-script"]
    assert commands.command_line(script) == script


def test_the_launcher_finds_the_program_that_a_file_names(tmp_path):
    words = ["--nproc-per-node", "2", "--config", "mamba", "--lr", "1"]
    assert launch.named(words)[2:] == commands.command_line(words[2:])
    for script in (["train.py"], ["gpt"]):
        assert launch.named([*words[:2], *script, *words[2:]]) == [*words[:2], *script, *words[2:]]


def test_the_launcher_takes_the_name_of_a_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    launch = parse(["--nproc-per-node", "2", "sft", "--lr", "1"], commands.command_line)
    assert launch.script[-4:] == (str(ROOT / "pretrain_gpt.py"), "--sft", "--lr", "1")


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["gtp"], 2, "megatron-train: gtp names no model: did you mean gpt?"),
        ([], 2, "usage: megatron-train NAME [flags]"),
        (["--help"], 0, "  t5      T5\n"),
        (["--config", "sft-loar"], 2, "no such file or recipe; did you mean sft-lora? "),
        (["--config", "none/sft.yaml"], 2, "no such file or recipe; did you mean sft? "),
        (["sft", "--config"], 2, "megatron-train: --config needs a file or a recipe; "),
        (["dpo", "--config", "sft"], 2, "/sft.yaml: the file has train: sft; leave dpo out"),
        (["--config", "LICENSE"], 2, "LICENSE names no program: add a line such as 'train: sft'"),
        (["completion", "fish"], 2, "megatron-train completion fish: use bash or zsh"),
    ],
)
def test_a_wrong_name_is_explained(words, status, text):
    ended = run(*words)
    assert ended.returncode == status
    assert text in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_shell_completes_names_and_flags(monkeypatch, tmp_path):
    script = tmp_path / "completion.sh"
    convert = "megatron-convert"
    monkeypatch.setattr(commands, "TOOLS", {convert: commands.TOOLS[convert]})
    monkeypatch.setattr(sys, "executable", forked.python())
    script.write_text(commands.completion("bash"))
    ask = """
        source "$1"
        COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2)); _megatron_complete; echo "${COMPREPLY[@]}"
    """

    def choices(*words: str) -> list[str]:
        command = ["bash", "-c", ask, "bash", str(script), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert choices("megatron-train", "v") == ["vlm", "vision"]
    assert choices("megatron-train", "gpt", "--hidden-s") == ["--hidden-size"]
    assert choices("/bin/megatron-convert", "--fam") == ["--family"]
    assert choices("megatron-train", "gpt", "10") == []
    assert choices("megatron-train", "--config", "sft") == ["sft", "sft-lora"]
