"""An argparse parser that reports all errors of a command line or file at once."""

from __future__ import annotations

import argparse
import contextlib
import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

from megatron.core.config.errors import ConfigError
from megatron.training.arguments import config_keys
from megatron.training.arguments.sections import options_by_dest
from megatron.training.arguments.suggestions import suggestion
from megatron.training.arguments.value_rules import problem_of_type, shown

_EXPECTED: dict[object, str] = {int: "a whole number is needed", float: "a number is needed"}


class Parser(argparse.ArgumentParser):
    """An argparse parser that continues after a bad value and suggests spellings.

    ``problems`` collects the error messages, ``warnings`` the warnings.  ``replaced``: dests of the
    flags in whose place a program has put flags of its own.
    """

    def __init__(self, *, description: str, usage: str) -> None:
        super().__init__(description=description, usage=usage, allow_abbrev=False)
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.replaced: list[str] = []

    @contextlib.contextmanager
    def may_replace(self, flags: Collection[str]) -> Iterator[None]:
        """Let a program add flags of its own that replace ``flags``.

        Raises ConfigError at the end for another flag that is added a second time.
        """
        before = dict(self._option_string_actions)
        takers = self, self._optionals  # of new groups, and of flags outside of groups
        for taker in takers:
            taker.conflict_handler = "resolve"
        yield
        for taker in takers:
            taker.conflict_handler = "error"
        after = self._option_string_actions
        for flag, action in before.items():
            if flag not in flags and after.get(flag) is not action:
                raise ConfigError(
                    f"the program adds the flag {flag}, which exists: give its flag another name, "
                    "or read the value of this one"
                )
            if after.get(flag) is not action:
                self.replaced.append(action.dest)

    def read_value(self, action: argparse.Action, text: str) -> object:
        """Parse one word for ``action``; on an error record the message and return None."""
        value = self._get_value(action, text)
        self._check_value(action, value)
        return value

    def _get_value(self, action: argparse.Action, arg_string: str) -> object:
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
        if "\0" in arg_string:  # from a file or a program; no path can contain NUL
            problem = "it holds a NUL character: remove it"
        if problem is None:
            return value
        self.problems.append(f"{_name(action)} {shown(arg_string)}: {problem}")
        return None

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is None or value in action.choices or value is None:
            return
        near = difflib.get_close_matches(str(value), [str(c) for c in action.choices], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        known = ", ".join(str(c) for c in action.choices if c is not None)
        known = known or "the registered names: none is; see --import-module"
        self.problems.append(f"{_name(action)} {value}: not one of {known}{hint}")

    def unknown_dest(self, key: str) -> str:
        """Return the error message for a key of a file that is not a flag."""
        known = [*(action.dest for action in self._actions), *config_keys.NAMES]
        return f"{key} is not a flag{suggestion(key, known)}"

    def unknown(self, words: Sequence[str]) -> list[str]:
        """Return an error message for each flag among ``words`` that is not declared."""
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
        """Print all recorded errors and exit with status 2, like argparse."""
        problems = [*self.problems, *([message] if message else [])]
        lines = "\n".join(f"  - {p}" for p in problems)
        self.exit(2, f"{self.prog}: the command line cannot be read:\n{lines}\n")


def _name(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.dest)
