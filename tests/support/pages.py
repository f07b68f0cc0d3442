"""Blocks of code of the pages for users."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from tests.repo.source import ROOT
from tools.dev import features, flags, matrix, tree

GENERATED = {tool.TARGET for tool in (features, flags, matrix, tree)}
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - GENERATED)]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of a page; ``language`` is "" for command lines."""

    language: str
    code: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """Return all blocks of code, in their order."""
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 2) for m in _BLOCK.finditer(text)]


def commands_of(page: Path, language: str = "") -> list[list[str]]:
    """Return the words of each command line, without comments."""
    code = "".join(block.code for block in blocks_of(page) if block.language == language)
    lines = code.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words]


def python_of(page: Path) -> list[Block]:
    """Return the blocks of Python, in their order."""
    return [block for block in blocks_of(page) if block.language == "python"]
