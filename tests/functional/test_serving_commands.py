"""The commands of docs/serving.md run."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from unittest import mock

import pytest

from megatron.core.config.errors import ConfigError
from megatron.training.arguments.parser import build_parser
from tests.support.pages import commands_of, python_of
from tests.support.server_process import ROOT, fake_server
from tools import text_generation_cli
from tools.run_text_generation_server import (
    adapters_of,
    add_server_flags,
    model_flags,
    warnings_of,
)

PAGE = (ROOT / "docs" / "serving.md").read_text()
COMMANDS = commands_of(ROOT / "docs" / "serving.md")
HERE = "localhost:5000"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text("{{ messages[-1].content }}")
    features = ("--features", "grammar", "control", "runtime_adapters")
    with fake_server(folder, "--chat-template", str(template), *features) as found:
        yield found


def test_commands_of_the_server_have_known_flags():
    starts = [c for c in COMMANDS if "tools/run_text_generation_server.py" in c]
    assert len(starts) == 5
    for words in starts:
        words = words[words.index("tools/run_text_generation_server.py") + 1 :]
        args = build_parser(add_server_flags).parse_args(words)
        assert args.load in ("checkpoints", "checkpoints/heads")
        assert args.port == 5000
        assert warnings_of(words) == []


def test_flags_of_a_training_script_are_accepted_and_named():
    words = "--load ck --num-layers 24 --fp16 --vocab-file v --top_k 1 --max-batch-size 4".split()
    args = build_parser(add_server_flags).parse_args(words)
    assert model_flags(args) == {}
    assert warnings_of(["--config", "a", "--yaml-cfg=a"]) == []
    of_requests, of_model = warnings_of(words)
    assert of_requests.startswith("--top_k: without effect")
    assert of_model.startswith("--fp16, --num-layers, --vocab-file: without effect")
    words += ["--no-use-tokenizer-model-from-checkpoint-args"]
    args = build_parser(add_server_flags).parse_args(words)
    assert model_flags(args) == {"vocab_file": "v"}
    assert warnings_of(words)[1].startswith("--fp16, --num-layers: without effect")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--lora-modules sql", "--lora-modules sql: give NAME=FOLDER"),
        ("--lora-modules a=x a=y", "a is the name of another model"),
        ("--lora-modules ck=x", "ck is the name of another model"),
        ("--allow-runtime-lora-updating --host 0.0.0.0", "--host 0.0.0.0 give --api-key-file"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(words, reason):
    args = build_parser(add_server_flags).parse_args(["--load", "ck", *words.split()])
    with pytest.raises(ConfigError, match=reason):
        adapters_of(args)


def test_adapters_have_names_and_folders():
    words = ["--load", "ck", "--lora-modules", "a=x", "b=y=z"]
    assert adapters_of(build_parser(add_server_flags).parse_args(words)) == {"a": "x", "b": "y=z"}


def test_flags_of_the_page_exist():
    parser = build_parser(add_server_flags)
    known = {flag for action in parser._actions for flag in action.option_strings}
    named = re.findall(r"`(--[\w-]+)", PAGE)
    assert named
    assert set(named) <= known


def test_requests_of_curl_are_answered(server):
    requests = [words for words in COMMANDS if words[0] == "curl"]
    assert len(requests) == 12
    for words in requests:
        url = next(word for word in words if word.startswith(HERE))
        body = words[words.index("-d") + 1].encode() if "-d" in words else None
        default = "POST" if body else "GET"
        method = words[words.index("-X") + 1] if "-X" in words else default
        kind = {"Content-Type": "application/x-www-form-urlencoded"} if body else {}
        status, _, content = server.ask_raw(method, url.removeprefix(HERE), body, kind)
        assert (status, bool(content)) == (200, True), words


def test_the_command_line_client_runs(server):
    (words,) = [c for c in COMMANDS if "tools/text_generation_cli.py" in c]
    address = server.url.removeprefix("http://")
    argv = [address if word == HERE else word for word in words[1:]]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(io.StringIO()) as said:
        text_generation_cli.main()
    assert "def main(def main(" in said.getvalue()


def test_the_programs_for_openai_run(server):
    pytest.importorskip("openai")
    programs = [block.code for block in python_of(ROOT / "docs" / "serving.md")]
    programs = [code for code in programs if "openai" in code and "image_url" not in code]
    said = io.StringIO()
    for program in programs:
        with contextlib.redirect_stdout(said):
            exec(program.replace(f"http://{HERE}", server.url), {})
    assert said.getvalue() == "def main(\nHello"


def test_every_path_of_the_page_exists(server):
    for method, path in re.findall(r"`(GET|POST|PUT) (/[\w/]*)`", PAGE):
        status, _, content = server.ask_raw(method, path, None if method == "GET" else {})
        assert status not in (404, 405), (method, path)
