"""The pages docs/adding_a_*.md for users: their file is written, and their command is run as it is.

A page has blocks of code whose first line is the name of a file, blocks of commands, and blocks of
text that the commands print.  Numbers in the text may differ.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.support import selection
from tests.support.pages import blocks_of, commands_of
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"[-+]?\d[\d.]*(?:[eE][-+]?\d+)?"


def page_of(page: str) -> Path:
    return ROOT / "docs" / f"adding_a_{page}.md"


def blocks(page: str, language: str) -> list[str]:
    return [block.code for block in blocks_of(page_of(page)) if block.language == language]


def write_files(page: str, folder: Path) -> None:
    for code in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", code):
            (folder / name[1]).write_text(code, encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """The words of each command, with the variable of the page in place."""
    found = commands_of(page_of(page), "bash")
    return [[word.replace("$MEGATRON", str(ROOT)) for word in words] for words in found]


def run_page(rank: int, world_size: int, page: str, folder: Path) -> str:
    """What all commands of the page print, in this process and in ``folder``."""
    os.chdir(folder)
    printed = io.StringIO()
    for program, script, *argv in commands(page):
        assert program == "python"
        if Path(script).name.startswith("pretrain_"):
            argv += ["--num-workers", "0"]  # the ranks of tests may have no children
        here = str(Path(script).parent)
        with (
            mock.patch("sys.argv", [script, *argv]),
            mock.patch("sys.path", [here, str(ROOT), *sys.path]),
            contextlib.redirect_stdout(printed),
        ):
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
    return printed.getvalue()


def assert_printed(page: str, output: str) -> None:
    """Every line of the page's text blocks is in ``output``, whatever its numbers."""
    for line in "".join(blocks(page, "text")).splitlines():
        pattern = NUMBER.join(map(re.escape, re.split(NUMBER, line.strip())))
        pattern = re.sub(r"(\\ )+", r"\\s+", pattern)
        assert re.search(pattern, output), f"{line!r} not in:\n{output}"


@pytest.mark.feature("Extensions: callbacks of your own with --callback MODULE:CLASS")
@pytest.mark.parametrize("page", selection.first(1, ["callback", "tokenizer"]))
def test_a_page_says_what_happens_as_programs_of_their_own(page: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    output = ""
    for command in commands(page):
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        output += done.stdout
    assert_printed(page, output)


@pytest.mark.feature("Extensions: model kinds, metrics, optimizers, tokenizers and datasets")
@pytest.mark.parametrize("page", ["model", "metric", "optimizer", "dataset"])
def test_a_page_says_what_happens(page: str, tmp_path: Path) -> None:
    write_files(page, tmp_path)
    (output,) = run_ranks(run_page, 1, page, tmp_path)
    assert_printed(page, output)


SPEC = """
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec


def layer(config):
    print("the spec of --spec")
    return get_gpt_layer_local_spec(config=config)
"""
# Further flags of the page for models -> text in what the run prints or in its checkpoint's index.
FLAGS_OF_A_LAYER_SPEC = {
    ("--spec", "my_spec", "layer"): "the spec of --spec",
    ("--mtp-num-layers", "1", "--position-embedding-type", "rope"): "--mtp-num-layers with",
    ("--num-experts", "2"): "decoder.layers.0.mlp.experts",
}


def train_model_of_the_page(rank: int, world_size: int, folder: Path, flags: list[str]) -> str:
    """Run the page's first command with further flags; return its output and checkpoint index."""
    printed = io.StringIO()
    write_files("model", folder)
    (folder / "my_spec.py").write_text(SPEC, encoding="utf-8")
    os.chdir(folder)
    _, script, *argv = commands("model")[0]
    argv += ["--num-workers", "0", *flags]
    with (
        mock.patch("sys.argv", [script, *argv]),
        mock.patch("sys.path", [str(folder), str(ROOT), *sys.path]),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            return f"{printed.getvalue()}\n{end}"
    index = Path("gain/iter_0000003/index.json").read_text(encoding="utf-8")
    return f"{printed.getvalue()}\n{index}"


@pytest.mark.parametrize("flags", FLAGS_OF_A_LAYER_SPEC, ids=lambda flags: flags[0])
def test_the_model_of_the_page_uses_or_refuses_flags(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    (output,) = run_ranks(train_model_of_the_page, 1, tmp_path, list(flags))
    assert FLAGS_OF_A_LAYER_SPEC[flags] in output
