"""Code of the pages for users: command lines are those of their programs, Python code runs.

The blocks of docs/adding_a_*.md that are files and ``bash`` are run by test_extension_pages.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.run import get_args_parser

import megatron_commands as commands
from megatron.core.config import rule
from megatron.core.config.errors import ConfigError
from megatron.post_training.rl.environment import open_environments
from megatron.training.arguments.parser import parse_args
from megatron.training.arguments.resolve import resolve
from megatron.training.arguments.rules.rule import Settings
from tests.repo.source import ROOT
from tests.support import forked
from tests.support import scripts_for_megatron as scripts
from tests.support.chat_templates import write_chat_tokenizer
from tests.support.one_process import one_process_groups
from tests.support.pages import PAGES, blocks_of, commands_of, python_of
from tests.support.ranks import run_ranks
from tests.support.runs import TINY, defaults_of, run_gpt, train_gpt
from tests.unit.models.test_mimo_model import IMAGE, batch, mimo

LANGUAGES = {"", "bash", "json", "mermaid", "python", "text", "yaml"}
# Programs of others; tests/functional/test_serving_commands.py runs curl.
OF_OTHERS = {"curl", "export", "lm_eval", "pip", "tensorboard"}
MODEL = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--seq-length": "64",
    "--max-position-embeddings": "8192",
    "--micro-batch-size": "1",
    "--lr": "1e-3",
    "--train-iters": "3",
    "--eval-iters": "0",
    "--hidden-dropout": "0",
    "--attention-dropout": "0",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
    "--device": "cpu",
}
OF_TEXT = {"--seq-length", "--max-position-embeddings"}
DATA = ("--data-path", "--train-data-path", "--mock-data", "--langrl-env-config")
PLACEHOLDERS = {
    "...": "",
    "$SLURM_NODEID": "0",
    "examples/<kind>/quickstart.sh": "examples/bert/quickstart.sh",
}
PROGRAM_OF_PAGE = {"pretrain_gain_gpt.py": "pretrain_gpt.py"}
NUM_RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|virtual-ranks|check-world-size) (\d+)")


class Parsed(Exception):
    """A program has accepted its command line."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_names_its_language_unless_it_has_commands(page: Path) -> None:
    assert {block.language for block in blocks_of(page)} <= LANGUAGES
    for block in blocks_of(page):
        if block.language == "json":
            lines = block.code.replace("[...]", "[]").replace(", ...}", "}").splitlines()
            assert all(json.loads(line) for line in lines)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.name
)
def test_programs_take_the_command_lines(page: Path) -> None:
    lines = [[as_run(word) for word in words] for words in commands_of(page)]
    (problems,) = run_ranks(problems_of, 1, lines)
    assert not problems, "\n".join(problems)


def of_checkout(words: list[str]) -> list[str]:
    """Return the command line with the program that a console command starts."""
    command, *rest = words
    if command == "megatron-train":
        words = commands.command_line(rest)
    elif command in commands.TOOLS:
        words = [commands.TOOLS[command], *rest]
    return [word.removeprefix(f"{ROOT}/") for word in words]


def as_run(word: str) -> str:
    """Return a word of a page without its placeholders."""
    return PLACEHOLDERS.get(word, word).replace("$MEGATRON/", "")


def problems_of(rank: int, world_size: int, lines: list[list[str]]) -> list[str]:
    """Return a message for each command line that its program does not take."""
    return [problem for words in lines for problem in _problems([w for w in words if w])]


def _problems(words: list[str]) -> list[str]:
    if "--config" in words or words[1:] == ["recipes"]:  # test_recipes.py, test_commands.py
        return []
    words = of_checkout(words)
    if words[0] in OF_OTHERS:
        return []
    if words[0] == "make":
        is_target = re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [] if is_target else [f"make {words[1]}: no such target"]
    at = next((i for i, word in enumerate(words) if word.endswith((".py", ".sh"))), None)
    if at is None:
        return [f"{' '.join(words)}: what does it start?"]
    program = PROGRAM_OF_PAGE.get(words[at], words[at])
    flags = words[at + 1 :]
    if not (ROOT / program).exists():
        return [f"{program} does not exist"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            if words[0] == "torchrun":
                get_args_parser().parse_args(words[1:])
            if program.startswith("pretrain_"):
                _resolve(program, flags, words)
            elif program.endswith(".py") and program != "tools/run_lm_eval.py":  # lm-eval's flags
                _parse(program, flags)
    except (SystemExit, ConfigError) as error:
        return [f"{' '.join(words)}: {error} {said.getvalue()[-500:]}"]
    return []


def _resolve(program: str, flags: list[str], words: list[str]) -> None:
    """Resolve the command line as --check-only does, with a model in place of the dots."""
    absent = {*flags} | (OF_TEXT if "vision_classify" in program else set())
    if "--epochs" in flags:
        absent.add("--train-iters")
    more = [w for flag, value in MODEL.items() if flag not in absent for w in (flag, value)]
    if not {*DATA} & {*flags}:
        more.append("--mock-data")
    if {"--save-hf", "--data-path"} <= {*flags}:  # a default of runs that start from a model folder
        more += ["--split", "95,5,0"]
    counts = NUM_RANKS.findall(" ".join(words))
    parsed = parse_args(argv=[*more, *flags], args_defaults=defaults_of(program))
    run = resolve(parsed, int(counts[-1]) if counts else 1)
    # The page may be about GPUs.
    ConfigError.raise_for(w for w in run.warnings if not w.endswith("it needs a GPU"))


def _parse(program: str, flags: list[str]) -> None:
    """Start a program until it has parsed its command line."""
    original = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        found = original(self, *args, **options)
        if found[1]:  # a parser that looks for one flag only, or an error
            return found
        raise Parsed

    path = ROOT / program
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse),
        mock.patch.object(sys, "argv", [program, *flags]),
        mock.patch.object(sys, "path", [str(path.parent), str(ROOT), *sys.path]),
        contextlib.suppress(Parsed),
    ):
        runpy.run_path(str(path), run_name="__main__")


# -- Python ---------------------------------------------------------------------------------


def code_of(page: str, place: int) -> str:
    return python_of(ROOT / "docs" / page)[place].code


def run_code(code: str, **names: Any) -> dict[str, Any]:
    """Run a block that finds ``names``; return what it defines."""
    exec(compile(code, "<page>", "exec"), names)
    return names


def check_check() -> None:
    rules = run_code(code_of("adding_a_check.md", 0))["RULES"]
    words = "--fp8-param-gather --kv-channels 8 --num-layers 2 --hidden-size 8 "
    words += "--num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 "
    words += "--mock-data --tokenizer-type NullTokenizer --vocab-size 8 --multi-latent-attention"
    config = resolve(parse_args(argv=words.split()), 1)
    heads = config.model.changed(num_attention_heads=3, qk_pos_emb_head_dim=3)
    asked = {**config.asked, "kv_channels": None}
    problems = rule.problems_of(rules, Settings(replace(config, model=heads, asked=asked)))
    assert [problem.split()[0] for problem in problems] == [
        "--hidden-size",
        "--fp8-param-gather",
        "--qk-pos-emb-head-dim",
    ]


def check_environment() -> None:
    os.makedirs("my_package")
    Path("my_package/my_module.py").write_text(code_of("rl.md", -1))
    Path("problems.jsonl").write_text('{"prompt": "1 + 1 = ", "result": 2}\n')
    (entries,) = [b.code for b in blocks_of(ROOT / "docs/rl.md") if "my_package" in b.code][:1]
    Path("environments.yaml").write_text(entries)
    found = open_environments("environments.yaml", 1)
    task = found.tasks(0, 1)[0]
    assert len(found.held_out) == 1
    assert task.reward("no number") == 0.0
    Path("rewards.py").write_text(code_of("rl.md", 0))
    (entries,) = [
        b.code for b in blocks_of(ROOT / "docs/rl.md") if "agent_type: functions" in b.code
    ]
    Path("functions.yaml").write_text(entries)
    task = open_environments("functions.yaml", 1).tasks(0, 1)[0]
    assert task.reward("2") == pytest.approx(1 - 0.2 / 100)


def check_checkpoints() -> None:
    weight = run_code(code_of("checkpoints.md", 0))["weight"]
    assert weight.ndim == 2


def check_llm() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run_code(code_of("serving.md", 3))
    assert said.getvalue().count("\n") >= 2


def check_engine() -> None:
    names = run_code(
        code_of("porting.md", 0),
        model=scripts.model_of(1, {}),
        tokenizer=scripts.Letters(),
        hidden_size=32,
        params_dtype=torch.float64,
        padded_vocab_size=scripts.VOCABULARY,
        prompts=scripts.PROMPTS[:2],
    )
    assert all(len(answer.generated_tokens) > 0 for answer in names["answers"])


def check_vision() -> None:
    loader = SimpleNamespace(state=lambda: "state")
    assert run_code(code_of("vision.md", 0))["Loader"](loader).save_state() == "state"
    images = mimo(one_process_groups()).mimo_config
    language = images.language_model_spec.params
    parts = images.modality_submodules_spec["images"].submodules
    rows = batch()
    ids = rows["input_ids"].where(rows["input_ids"] < IMAGE, 0)
    ids[0, 1:9] = 32000
    names = run_code(
        code_of("vision.md", 1),
        clip_spec=parts["encoders"]["clip"],
        projection_spec=parts["input_projections"][0],
        config=language["config"],
        arguments={name: value for name, value in language.items() if name != "config"},
        ids=ids,
        pixels=rows["modality_inputs"]["images"]["clip"]["x"],
        **{name: rows[name] for name in ("position_ids", "labels", "loss_mask")},
    )
    assert names["losses"].shape == ids.shape


CHECKS: dict[str, tuple[Callable[[], None], bool]] = {  # whether it needs a model
    "adding_a_check.md": (check_check, False),
    "checkpoints.md": (check_checkpoints, True),
    "porting.md": (check_engine, False),
    "rl.md": (check_environment, False),
    "serving.md": (check_llm, True),
    "vision.md": (check_vision, False),
}


FILE = re.compile(r"# my_\w+\.py\n|# pretrain_\w+\.py\n")  # test_extension_pages.py runs these
# Page -> blocks that tests run; test_serving_commands.py and test_server_images.py run four.
NUM_RUN = {
    "README.md": 1,
    "adding_a_check.md": 1,
    "checkpoints.md": 1,
    "library.md": 1,  # test_simple_train_loop.py runs it
    "porting.md": 1,
    "rl.md": 2,
    "serving.md": 5,
    "vision.md": 3,
}


def check_in(rank: int, world_size: int, page: str, folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    CHECKS[page][0]()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that writes text, in ``checkpoints``."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("pages")
    write_chat_tokenizer(folder)
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    flags += ["--position-embedding-type", "rope", "--train-iters", "1"]
    flags += ["--max-position-embeddings", "64"]  # for the chat of serving.md
    run_gpt(folder, *flags, "--save", str(folder / "checkpoints"))
    return folder


def test_the_callback_that_generates_between_steps_runs(tmp_path: Path) -> None:
    (tmp_path / "my_samples.py").write_text(code_of("serving.md", 4))
    (said,) = run_ranks(run_callback, 1, str(tmp_path))
    assert len(re.findall(r"^\[\d+(?:, \d+)*\]$", said, re.MULTILINE)) == 2


def run_callback(rank: int, world_size: int, folder: str) -> str:
    sys.path.insert(0, folder)
    flags = ["--callback", "my_samples:Samples", "--position-embedding-type", "rope"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train_gpt(rank, world_size, [*TINY, *flags, "--train-iters", "2"])
    return said.getvalue()


def test_every_block_of_python_is_run_by_a_test() -> None:
    """Add a test of a new block, here or beside its kin, and count it."""
    found = {
        page.name: count
        for page in PAGES
        if (count := sum(not FILE.match(block.code) for block in python_of(page)))
    }
    assert found == NUM_RUN


def test_the_library_example_of_the_readme_trains_one_model_on_two_ranks(tmp_path: Path) -> None:
    (block,) = python_of(ROOT / "README.md")
    (tmp_path / "library.py").write_text(block.code)
    command = [*forked.torchrun(2), "library.py"]
    said = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    losses = re.findall(r"loss (\S+) on rank [01]", said)  # two ranks may write into one line
    assert len(losses) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize("page", CHECKS)
def test_python_code_of_a_page_runs(
    page: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue("trained") if CHECKS[page][1] else tmp_path
    run_ranks(check_in, 1, page, str(folder))
