"""A flag is implemented, refused with a sentence, or accepted with one warning; nothing else."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.option import Option, dest_of, flag_of, options_of
from megatron.training.arguments.options import state
from megatron.training.arguments.parser import build_parser
from megatron.training.arguments.resolve import states
from megatron.training.arguments.sections import ALL_CLASSES
from tests.support.command_lines import run_of

ROOT = Path(__file__).resolve().parents[3]
FLAGS = {
    flag_of(f, opt): (f, opt) for config_class in ALL_CLASSES for f, opt in options_of(config_class)
}
PARSER = build_parser()

# Where reading a field does not make its flag do anything.
SOURCES = ("megatron/**/*.py", "pretrain_*.py", "tools/**/*.py")
DECLARATIONS = (
    "megatron/core/config/",
    "megatron/core/transformer/config/",
    "megatron/core/model_parallel_config.py",
    "megatron/core/optimizer/optimizer_config.py",
    "megatron/core/distributed/distributed_data_parallel_config.py",
    "megatron/training/config/",
    "megatron/training/arguments/rules/",
    "megatron/training/compat/arguments.py",
)
# Programs for images read some flags there alone, to refuse all values but one.
OF_IMAGES = "megatron/training/arguments/rules/images.py"


def words_for(flag: str) -> list[str]:
    """The flag with a value that is not its default."""
    action = PARSER._option_string_actions[flag]
    if action.nargs == 0:
        is_on = action.default is True and len(action.option_strings) > 1
        return [f"--no-{flag.removeprefix('--')}" if is_on else flag]
    if action.choices:
        default = action.default if isinstance(action.default, list) else [action.default]
        other = next(c for c in action.choices if c is not None and c not in default)
        return [flag, str(other)]
    if action.type in (int, float):
        return [flag, "77"]
    return [flag, "true" if "bool" in str(action.type) else "7"]


@pytest.mark.parametrize("flag", [flag for flag, (_, opt) in FLAGS.items() if opt.refused])
def test_a_refused_flag_says_why(flag: str) -> None:
    refused, _ = states(PARSER.parse_args(words_for(flag)))
    assert len(refused) == 1
    assert refused[0].startswith(flag)
    assert refused[0].endswith(str(FLAGS[flag][1].refused))


@pytest.mark.parametrize("flag", [flag for flag, (_, opt) in FLAGS.items() if opt.ignored])
def test_an_ignored_flag_gets_one_warning(flag: str) -> None:
    words = words_for(flag)
    _, ignored = states(PARSER.parse_args(words))
    assert len(ignored) == 1
    assert ignored[0].startswith(words[0])
    assert ignored[0].endswith(f" is without effect: {FLAGS[flag][1].ignored}")


@pytest.mark.parametrize(
    ("flag", "value"),
    [(flag, value) for flag, (_, opt) in FLAGS.items() for value in opt.refused_values],
)
def test_a_refused_value_says_why(flag: str, value: object) -> None:
    refused, _ = states(PARSER.parse_args([flag, str(value)]))
    assert refused == [f"{flag} {value}: {FLAGS[flag][1].refused_values[value]}"]


def test_defaults_are_never_refused_or_warned_about() -> None:
    assert states(PARSER.parse_args([])) == ([], [])


def test_a_flag_has_one_state_and_a_sentence_of_its_own() -> None:
    for flag, (_, opt) in FLAGS.items():
        assert not (opt.refused and opt.ignored), flag
        assert opt.help.endswith("."), flag
        assert opt.help.isascii(), flag
    helps = [opt.help for _, opt in FLAGS.values()]
    assert len(helps) == len(set(helps))


def test_every_refusal_names_a_way_out() -> None:
    ways = ("use ", "leave --", "only --ckpt-format", "--group-query-attention")
    for flag, (_, opt) in FLAGS.items():
        for reason in (opt.refused, *opt.refused_values.values()):
            assert reason is None or any(way in reason for way in ways), (flag, reason)


def attributes_read() -> set[str]:
    """Names of attributes that the project reads, other than to call them.

    Beside the declarations of flags, in the functions beside these, and in those properties of
    theirs that it reads.
    """
    names: set[str] = set()
    properties: dict[str, set[str]] = {}
    for file in (f for pattern in SOURCES for f in ROOT.glob(pattern)):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        path = file.relative_to(ROOT).as_posix()
        if path == OF_IMAGES or not path.startswith(DECLARATIONS):
            names |= read_in(tree)
            continue
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            names |= read_in(function)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "property" in map(
                ast.unparse, node.decorator_list
            ):
                properties.setdefault(node.name, set()).update(read_in(node))
    left = names & properties.keys()
    while left:  # a property may read another one
        names |= set().union(*(properties[name] for name in left))
        for name in left:
            del properties[name]
        left = names & properties.keys()
    return names


def read_in(tree: ast.AST) -> set[str]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and id(node) not in called
    }
    return names | {  # spec.need("vocab_file")
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "need"
        and isinstance(node.args[0], ast.Constant)
    }


def unread() -> list[str]:
    """Flags in the fourth state: neither refused nor ignored, and nothing reads them."""
    read = attributes_read()

    def is_read(f: dataclasses.Field[Any], opt: Option) -> bool:
        has_no_choice = set(opt.choices or ("any",)) <= {f.default, *opt.refused_values}
        return f.name in read or dest_of(f, opt) in read or has_no_choice

    return [
        flag
        for flag, (f, opt) in FLAGS.items()
        if state(opt) == "implemented" and not is_read(f, opt)
    ]


@pytest.mark.feature(
    "Command line: each flag acts, is refused with a sentence or is announced as idle"
)
def test_there_is_no_fourth_state() -> None:
    assert unread() == []


@pytest.mark.feature("Command line: a flag that only makes a run faster is announced, not refused")
@pytest.mark.parametrize(
    "flag",
    [
        "--flash-decode",
        "--pipeline-model-parallel-comm-backend ucc",
        "--symmetric-ar-type one_shot",
        "--use-ring-exchange-p2p",
        "--use-sharp",
    ],
)
def test_a_flag_that_only_makes_a_run_faster_is_announced(flag: str) -> None:
    assert any(w.startswith(f"{flag} is without effect: ") for w in run_of(flag).warnings)
