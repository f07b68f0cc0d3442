"""What a flag needs beside it for having an effect: the kinds of entries of a table of them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class FlagRequirement:
    """Requirement of ``flags`` (dests) for having an effect; ``is_met`` tests the namespace."""

    words: str
    flags: tuple[str, ...]
    is_met: Callable[[Namespace], bool]


def needs(words: str, dests: str, is_met: Callable[[Namespace], bool]) -> FlagRequirement:
    return FlagRequirement(words, tuple(dests.split()), is_met)


def needs_flag(dest: str, dests: str) -> FlagRequirement:
    """Return the requirement that switch ``dest`` is on or flag ``dest`` has a value."""

    def is_given(ns: Namespace) -> bool:
        value = vars(ns)[dest]
        return value is not None and value is not False

    return needs(spelt(dest), dests, is_given)


def needs_value(dest: str, value: str, dests: str) -> FlagRequirement:
    """Return the requirement that flag ``dest`` has the value ``value``."""
    return needs(f"{spelt(dest)} {value}", dests, lambda ns: vars(ns)[dest] == value)


def spelt(dest: str) -> str:
    return "--" + dest.replace("_", "-")
