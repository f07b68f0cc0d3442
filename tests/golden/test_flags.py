"""Every flag of the reference exists here with the same spelling, dest, type and default."""

from __future__ import annotations

import argparse
import enum
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.training.arguments.options import GROUPS
from megatron.training.arguments.parser import build_parser
from tests.support.command_lines import CHANGED_DEFAULTS

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "flags.json").read_text(encoding="utf-8")
)
ACTIONS = {
    "StoreAction": argparse._StoreAction,
    "StoreTrueAction": argparse._StoreTrueAction,
    "StoreFalseAction": argparse._StoreFalseAction,
}
# Types the reference leaves to the reader of the value.
NARROWED = {"--rampup-batch-size": int}


@pytest.fixture(scope="module")
def actions() -> dict[str, argparse.Action]:
    return build_parser()._option_string_actions


def plain(value: Any) -> Any:
    return f"enum:{value.name}" if isinstance(value, enum.Enum) else value


@pytest.mark.feature("Command line: all 513 flags of Megatron-LM, same spelling, type and default")
def test_all_513_flags_exist_with_all_spellings(actions: dict[str, argparse.Action]) -> None:
    assert len(GOLDEN) == 513
    missing = [flag for g in GOLDEN for flag in g["flags"] if flag not in actions]
    assert missing == []


def test_dests_and_actions_are_the_reference_ones(actions: dict[str, argparse.Action]) -> None:
    wrong = [
        (g["flags"][0], actions[g["flags"][0]].dest, type(actions[g["flags"][0]]).__name__)
        for g in GOLDEN
        if actions[g["flags"][0]].dest != g["dest"]
        or type(actions[g["flags"][0]]) is not ACTIONS[g["action"]]
    ]
    assert wrong == []


def test_defaults_differ_only_where_the_table_says(actions: dict[str, argparse.Action]) -> None:
    changed = {g["dest"] for g in GOLDEN if plain(actions[g["flags"][0]].default) != g["default"]}
    assert changed == set(CHANGED_DEFAULTS)


def test_number_defaults_have_the_type_of_their_flag(actions: dict[str, argparse.Action]) -> None:
    wrong = [
        a.option_strings[0]
        for a in set(actions.values())
        if isinstance(a.default, (int, float))
        and a.type in (int, float)
        and type(a.default) is not a.type
    ]
    assert wrong == []


def test_value_types_and_counts_are_the_reference_ones(
    actions: dict[str, argparse.Action],
) -> None:
    known = {"int": int, "float": float, "str": str, None: str}
    for g in GOLDEN:
        flag, action = g["flags"][0], actions[g["flags"][0]]
        if g["action"] != "StoreAction":
            continue
        assert action.nargs == g["nargs"], flag
        if flag in NARROWED:
            assert action.type is NARROWED[flag]
        elif g["type"] in known:
            assert action.type is known[g["type"]], flag
        else:  # a parsing function of the reference: ours is one too
            assert callable(action.type), flag
            assert action.type not in known.values(), flag


def test_choices_are_a_superset_of_the_reference_ones(
    actions: dict[str, argparse.Action],
) -> None:
    for g in GOLDEN:
        if g["choices"] is None:
            continue
        ours = {str(c) for c in actions[g["flags"][0]].choices or ()}
        assert {str(c) for c in g["choices"]} <= ours, g["flags"][0]


def test_headings_come_in_the_reference_order() -> None:
    reference = list(dict.fromkeys(g["group"] for g in GOLDEN))
    assert [h for h in GROUPS if h in reference] == reference


def test_a_flag_stands_under_the_reference_heading() -> None:
    heading = {
        action.option_strings[0]: group.title
        for group in build_parser()._action_groups
        for action in group._group_actions
        if action.option_strings
    }
    wrong = [g["flags"][0] for g in GOLDEN if heading[g["flags"][0]] != g["group"]]
    assert wrong == []
