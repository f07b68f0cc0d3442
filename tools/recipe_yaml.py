"""Read the YAML that test recipes are written in, without PyYAML.

The subset: mappings and lists in block style, flow lists of scalars, scalars plain or quoted,
literal blocks, comments.  Every scalar stays the text it was written as: recipes become command
lines, where ``1e-4`` must not turn into something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DataError
from megatron.core.optional import available, require

_KEY = re.compile(r"""(?P<key>"[^"]*"|'[^']*'|[^\s#"'\[\]{}][^#]*?)\s*:(?:\s+(?P<rest>.*))?$""")
_COMMENT = re.compile(r"\s+#.*$")


class UnknownSyntax(ValueError):
    """The text leaves the subset; the message starts with the line number."""


@dataclass(frozen=True)
class _Line:
    number: int
    indent: int
    text: str  # without indentation and comment


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in ``path``; PyYAML takes what the subset does not cover, if it is there."""
    text = path.read_text()
    try:
        value = parse(text)
    except UnknownSyntax as error:
        if not available("yaml"):
            raise DataError(
                f"{path}:{error} (PyYAML reads all of YAML: pip install pyyaml)"
            ) from None
        yaml = require("yaml", str(path))
        value = yaml.load(text, Loader=yaml.BaseLoader)
    if not isinstance(value, dict):
        raise DataError(f"{path}: a recipe is a mapping with MODEL_ARGS, this is no mapping")
    return value


def parse(text: str) -> Any:
    """Mappings, lists and texts; raises `UnknownSyntax`.

    >>> parse("MODEL_ARGS:\\n  --lr: 1e-4 # small\\n  --bf16: true\\nMETRICS: [a, 'b c']")
    {'MODEL_ARGS': {'--lr': '1e-4', '--bf16': 'true'}, 'METRICS': ['a', 'b c']}
    """
    raw = text.splitlines()
    lines = list(_significant(raw))
    value, end = _block(raw, lines, 0, lines[0].indent) if lines else ({}, 0)
    if end < len(lines):
        raise UnknownSyntax(f"{lines[end].number}: the indentation fits nothing above it")
    return value


def _significant(raw: list[str]) -> Iterator[_Line]:
    for number, row in enumerate(raw, 1):
        bare = row.lstrip(" ")
        if "\t" in row[: len(row) - len(row.lstrip())]:
            raise UnknownSyntax(f"{number}: a tab in the indentation")
        if bare and not bare.startswith("#") and bare.rstrip() != "---":
            yield _Line(number, len(row) - len(bare), bare.rstrip())


def _block(raw: list[str], lines: list[_Line], at: int, indent: int) -> tuple[Any, int]:
    """The mapping or list whose entries stand at ``indent``, and the index after it."""
    is_list = lines[at].text.startswith("- ") or lines[at].text == "-"
    mapping: dict[str, Any] = {}
    items: list[Any] = []
    while at < len(lines) and lines[at].indent == indent:
        line = lines[at]
        if line.text.startswith("- ") != is_list:
            break
        if is_list:
            items.append(_scalar(line.text[2:].strip(), line))
            at += 1
            continue
        found = _KEY.match(line.text)
        if not found:
            raise UnknownSyntax(f"{line.number}: neither 'key: value' nor '- item'")
        key = _unquoted(found["key"])
        if key in mapping:
            raise UnknownSyntax(f"{line.number}: {key} stands twice")
        mapping[key], at = _value(raw, lines, at, found["rest"] or "")
    return (items if is_list else mapping), at


def _value(raw: list[str], lines: list[_Line], at: int, rest: str) -> tuple[Any, int]:
    """What follows ``key:``: on the same line, or in the lines below it."""
    line, after = lines[at], at + 1
    rest = "" if rest.startswith("#") else rest
    if rest in {"|", "|-", ">", ">-"}:
        while after < len(lines) and lines[after].indent > line.indent:
            after += 1
        last = lines[after].number - 1 if after < len(lines) else len(raw)
        rows = [row.strip() for row in raw[line.number : last]]
        return ("\n" if rest[0] == "|" else " ").join(rows).strip(), after
    if rest:
        return _scalar(rest, line), after
    if after < len(lines):
        below = lines[after]
        is_list_below = below.text.startswith("- ") and below.indent == line.indent
        if below.indent > line.indent or is_list_below:
            return _block(raw, lines, after, below.indent)
    return "", after


def _scalar(text: str, line: _Line) -> Any:
    if not text:
        return ""
    if text[0] in "\"'":
        end = text.find(text[0], 1)
        tail = text[end + 1 :].strip() if end > 0 else "x"
        if tail and not tail.startswith("#"):
            raise UnknownSyntax(f"{line.number}: text after the closing quote, or no such quote")
        return text[1:end]
    text = _COMMENT.sub("", text)
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1].strip()
        parts = re.findall(r"""\s*("[^"]*"|'[^']*'|[^,\[\]{}"']+?)\s*(?:,|$)""", inner)
        return [_unquoted(part) for part in parts]
    if text[0] in "{&*!%@`[":
        raise UnknownSyntax(f"{line.number}: {text[0]!r} starts a part of YAML not read here")
    return text


def _unquoted(text: str) -> str:
    return text[1:-1] if text[:1] in {'"', "'"} else text
