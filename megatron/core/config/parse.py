"""Parsers of command-line values for which argparse has no type."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import TypeVar

E = TypeVar("E", bound=enum.Enum)
_MAX_ENTRIES = 100_000  # maximum length of a layer pattern
_MAX_BRACKETS = 200  # in a layer pattern; bounds the recursion, three calls per bracket


def strict_bool(text: str) -> bool:
    """Parse ``true``, ``1``, ``yes``, ``false``, ``0`` or ``no``.

    Raises ValueError for other text, which ``bool()`` would accept as True.
    """
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def member_of(members: type[E]) -> Callable[[str], E]:
    """Return a parser of the member names of an enum."""

    def parse(text: str) -> E:
        if text not in members.__members__:
            raise ValueError(f"not one of {', '.join(members.__members__)}")
        return members[text]

    return parse


def unquoted(text: str) -> str:
    """Strip one pair of quotes around ``text``, left by a script that quotes twice."""
    text = text.strip()
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1].strip() if is_quoted else text


def int_pair(text: str) -> tuple[int, int]:
    """Parse two integers, for example ``128,0`` or ``(128, 0)``."""
    match = re.fullmatch(r"\s*[(\[]?\s*(-?\d+)\s*,\s*(-?\d+)\s*[)\]]?\s*", text)
    if match is None:
        raise ValueError("give two integers such as 128,0")
    return int(match[1]), int(match[2])


def layer_frequency(text: str) -> int | tuple[int, ...]:
    """Parse an int, or a list expression of digits and ``[]()+*,`` such as ``([1]*3+[0])*2``."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    tokens = re.findall(r"\d+|[\[\]()+*,]|\S", text)
    if sum(token in "([" for token in tokens) > _MAX_BRACKETS:
        raise ValueError(f"a layer pattern has more than {_MAX_BRACKETS} brackets")
    value, rest = _sum(tokens)
    if rest or not isinstance(value, tuple):
        raise ValueError(f"{text!r} is not an int or a list expression like ([1]*3+[0])*2")
    return value


def _sum(tokens: list[str]) -> tuple[int | tuple[int, ...], list[str]]:
    value, tokens = _product(tokens)
    while tokens[:1] == ["+"]:
        term, tokens = _product(tokens[1:])
        value = value + term  # type: ignore[operator]
    return value, tokens


def _product(tokens: list[str]) -> tuple[int | tuple[int, ...], list[str]]:
    value, tokens = _atom(tokens)
    while tokens[:1] == ["*"]:
        factor, tokens = _atom(tokens[1:])
        if _size(value) * _size(factor) > _MAX_ENTRIES:
            raise ValueError(f"a layer pattern has more than {_MAX_ENTRIES} entries")
        value = value * factor  # type: ignore[operator]
    return value, tokens


def _size(value: int | tuple[int, ...]) -> int:
    """Return the value of an int factor (number of repetitions), or the length of a list."""
    return value if isinstance(value, int) else len(value)


def _atom(tokens: list[str]) -> tuple[int | tuple[int, ...], list[str]]:
    head, rest = (tokens[0], tokens[1:]) if tokens else ("", [])
    if head.isdigit():
        return int(head), rest
    if head not in ("(", "["):
        raise ValueError(f"unexpected {head!r} in a layer pattern")
    closing = ")" if head == "(" else "]"
    items: list[int | tuple[int, ...]] = []
    while rest and rest[0] != closing:
        item, rest = _sum(rest)
        items.append(item)
        if rest[:1] == [","]:
            rest = rest[1:]
    if not rest:
        raise ValueError(f"a layer pattern misses its {closing!r}")
    if head == "(":
        if len(items) != 1:
            raise ValueError("parentheses in a layer pattern hold one expression")
        return items[0], rest[1:]
    if not all(isinstance(i, int) for i in items):
        raise ValueError("a list in a layer pattern holds ints")
    return tuple(i for i in items if isinstance(i, int)), rest[1:]
