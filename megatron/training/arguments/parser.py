"""The command line: generated from the sections, every mistake in it reported at once.

Users' own flags come through ``extra_args_provider(parser)``, which gets the real argparse parser.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.training.arguments import config_keys
from megatron.training.arguments.config_file import read_config_file, set_defaults_from
from megatron.training.arguments.describe import help_line
from megatron.training.arguments.options import add_options, groups_of
from megatron.training.arguments.sections import ALL_CLASSES, flags_and_defaults, options_by_dest
from megatron.training.arguments.suggestions import suggestion
from megatron.training.arguments.value_rules import problem_of_type, shown

ExtraArgsProvider = Callable[[argparse.ArgumentParser], "argparse.ArgumentParser | None"]

_EXPECTED: dict[Any, str] = {int: "a whole number is needed", float: "a number is needed"}


class Parser(argparse.ArgumentParser):
    """An argparse parser that goes on after a bad value and suggests spellings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def read_value(self, action: argparse.Action, text: str) -> Any:
        """One word as ``action`` reads it; a mistake is noted and gives None."""
        value = self._get_value(action, text)
        self._check_value(action, value)
        return value

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        parse = self._registry_get("type", action.type, action.type)
        value = None
        try:
            value = parse(arg_string)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            problem: str | None = _EXPECTED.get(parse, str(error))
        else:
            opt = options_by_dest().get(action.dest)
            is_ours = opt is not None and value != action.default
            problem = problem_of_type(value, opt) if is_ours and opt is not None else None
        if "\0" in arg_string:  # only a file or a program can pass it; no path may hold it
            problem = "it holds a NUL character: remove it"
        if problem is None:
            return value
        self.problems.append(f"{_name(action)} {shown(arg_string)}: {problem}")
        return None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices or value is None:
            return
        near = difflib.get_close_matches(str(value), [str(c) for c in action.choices], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = ", ".join(str(c) for c in action.choices if c is not None)
        self.problems.append(f"{_name(action)} {value}: not one of {known}{hint}")

    def unknown_dest(self, key: str) -> str:
        """A sentence for a key of a file that is no flag."""
        known = [*(action.dest for action in self._actions), *config_keys.NAMES]
        return f"{key} is not a flag{suggestion(key, known)}"

    def unknown(self, words: Sequence[str]) -> list[str]:
        """A sentence for each flag among ``words`` that no section declares."""
        names = [s for action in self._actions for s in action.option_strings]
        problems = []
        for before, word in zip(("", *words), words, strict=False):
            if word.startswith("--"):
                flag = word.split("=", 1)[0]
                problems.append(f"{flag} is not a flag{suggestion(flag, names)}")
            elif not before.startswith("--"):
                problems.append(f"{word!r} belongs to no flag")
        return problems

    def error(self, message: str) -> NoReturn:
        """Print everything found so far and end with status 2, as argparse does."""
        problems = [*self.problems, *([message] if message else [])]
        lines = "\n".join(f"  - {p}" for p in problems)
        self.exit(2, f"{self.prog}: the command line cannot be read:\n{lines}\n")


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.dest)


def build_parser(extra_args_provider: ExtraArgsProvider | None = None) -> Parser:
    """A parser of all flags, grouped as the reference groups them."""
    parser = Parser(
        description="Train large transformers. Switches are off unless given.",
        usage="%(prog)s [flags]",
    )
    groups = groups_of(parser)
    for config_class in ALL_CLASSES:
        add_options(groups, config_class, help_line)
    if extra_args_provider is not None:
        extended = extra_args_provider(parser)
        if isinstance(extended, Parser):
            parser = extended
    return parser


# Attribute of a parsed namespace: sentences for the user that `resolve` passes on.
PARSE_WARNINGS = "parse_warnings"


def parse_args(
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
    argv: Sequence[str] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> argparse.Namespace:
    """The command line as a namespace, on top of --yaml-cfg's file.

    A mistake ends the program with status 2; ConfigError is raised for a file that cannot be read.

    ``args_defaults`` (dest -> value) are a program's own defaults for values that are None.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(extra_args_provider)
    path = _yaml_cfg(words)
    if path is not None:
        set_defaults_from(parser, read_config_file(path), path)
    args, rest = parser.parse_known_args(words)
    if not ignore_unknown_args:
        parser.problems.extend(parser.unknown(rest))
    if parser.problems:
        parser.error("")
    vars(args)[PARSE_WARNINGS] = [*parser.warnings, *apply_defaults(args, args_defaults or {})]
    return args


def _yaml_cfg(words: Sequence[str]) -> str | None:
    """The value of --yaml-cfg, which has to be read before all others."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--yaml-cfg", default=None, nargs="?")
    path: str | None = finder.parse_known_args(words)[0].yaml_cfg
    return path


def apply_defaults(args: argparse.Namespace, defaults: Mapping[str, Any]) -> list[str]:
    """Set what is None to a program's default.

    A sentence comes back for each that a flag's own default keeps out, where a person may think
    that the program's is at work.
    """
    warnings = []
    given = vars(args)
    for dest, value in defaults.items():
        flag, own = flags_and_defaults().get(dest, (dest, None))
        if given.get(dest) is None:
            given[dest] = value
        elif given[dest] == own != value:
            warnings.append(f"{flag} is {own} and not this program's default {value}: give it")
    return warnings
