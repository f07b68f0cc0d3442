"""docs/differences.md says what is so: tables are compared with the code, examples tried."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.core.config.option import flag_of
from megatron.training.arguments.options import state
from megatron.training.arguments.parser import build_parser
from megatron.training.arguments.sections import flags_and_defaults
from tests.support.command_lines import CHANGED_DEFAULTS, problems_of
from tools.dev import flags as flags_page

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/differences.md").read_text(encoding="utf-8")
GOLDEN = json.loads((ROOT / "tests/golden/flags.json").read_text(encoding="utf-8"))


def section(heading: str) -> str:
    return PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]


def examples() -> list[str]:
    rows = [line for line in section("Rules that are lifted").splitlines() if "`" in line]
    return [row.split("`")[-2] for row in rows if "any, on top" not in row]


def test_changed_defaults_are_the_ones_in_the_code() -> None:
    rows = [r for r in section("Changed defaults").splitlines() if r.startswith("| `")]
    flags = flags_and_defaults()
    assert {r.split("`")[1] for r in rows} == {flags[dest][0] for dest in CHANGED_DEFAULTS}
    for dest, reason in CHANGED_DEFAULTS.items():
        row = next(r for r in rows if f"`{flags[dest][0]}`" in r)
        assert reason in row
        there = next(str(g["default"]) for g in GOLDEN if g["dest"] == dest)
        assert f"| `{there}` |" in row


@pytest.mark.parametrize("words", examples())
def test_a_lifted_rule_no_longer_refuses(words: str) -> None:
    world_size = 2 if "-parallel-size 2" in words else 1
    assert problems_of(words, world_size) == []


COMMUNICATION = re.compile(
    r"tp-comm|nccl-(ub|comm)|sharp|-priority-|p2p$|comm-backend|double-buffer"
)


def test_every_flag_of_communicators_is_in_the_table_with_its_state() -> None:
    told = {}
    for row in section("Communicators and overlap").splitlines():
        if row.startswith("| `"):
            _, flags, word, _ = row.split("|", 3)
            told |= dict.fromkeys(re.findall(r"`(--[\w-]+)`", flags), word.strip())
    found = {flag_of(f, opt): state(opt) for f, opt in flags_page.declared()}
    assert told == {flag: s for flag, s in found.items() if COMMUNICATION.search(flag)}


HELP = {"-h", "--help", "--help-all"}


def test_every_refusal_is_explained() -> None:
    told = set(re.findall(r"`(--[\w-]+)[`\s]", section("Refused flags")))
    options = [(flag_of(f, opt), opt) for f, opt in flags_page.declared()]
    assert told == {flag for flag, opt in options if opt.refused or opt.refused_values}


def test_every_flag_of_our_own_is_named() -> None:
    reference = {spelling for g in GOLDEN for spelling in g["flags"]} | HELP
    own = {s for action in build_parser()._actions for s in action.option_strings} - reference
    named = set(re.findall(r"`(--[\w-]+)[`\s]", PAGE))
    assert own <= named


def test_every_flag_that_is_named_exists() -> None:
    known = {s for action in build_parser()._actions for s in action.option_strings}
    assert set(re.findall(r"(?<![\w-])(--[a-z][\w-]+)", PAGE)) <= known


def test_the_page_of_flags_has_a_row_for_every_flag() -> None:
    known = {s for action in build_parser()._actions for s in action.option_strings}
    rows = [line for line in flags_page.render().splitlines() if line.startswith("| `--")]
    shown = set(re.findall(r"`(--[\w-]+)`", "".join(row.split(" | ")[0] for row in rows)))
    assert known - HELP <= shown
