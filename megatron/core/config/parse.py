"""Parsers of command-line values for which argparse has no type, and of tables of flags."""

from __future__ import annotations

import ast
import contextlib
import enum
import math
import operator
import re
from collections.abc import Callable
from typing import Any, TypeVar

E = TypeVar("E", bound=enum.Enum)
_MAX_ENTRIES = 100_000  # maximum length of a layer pattern


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


def parse_table(text: str) -> dict[str, str]:
    """Return the rows ``key | value`` of ``text``; an indented line continues the row before."""
    rows = re.sub(r"\n +", " ", text.strip()).splitlines()
    return {key: value for key, value in (row.split(" | ", 1) for row in rows)}


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
    value: Any = None
    if re.fullmatch(r"[\d\s\[\]()+*,]+", text):  # other text makes the parser of Python warn
        # The parser raises MemoryError where the expression is nested too deeply.
        with contextlib.suppress(SyntaxError, RecursionError, MemoryError, TypeError):
            value = _evaluated(ast.parse(text.strip(), mode="eval").body)
    if not isinstance(value, tuple):
        raise ValueError("a layer pattern is an int or a list expression like ([1]*3+[0])*2")
    return value


def _evaluated(node: ast.expr) -> Any:
    """Return the int or tuple of ints that numbers, lists of them, + and * give; else TypeError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return tuple(operator.index(_evaluated(item)) for item in node.elts)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Mult):
        raise TypeError(f"{type(node).__name__} in a layer pattern")
    left, right = _evaluated(node.left), _evaluated(node.right)
    is_sum = isinstance(node.op, ast.Add)
    sizes = [value if isinstance(value, int) else len(value) for value in (left, right)]
    if not is_sum and math.prod(sizes) > _MAX_ENTRIES:
        raise ValueError(f"a layer pattern has more than {_MAX_ENTRIES} entries")
    return left + right if is_sum else left * right
