"""Write docs/tree.md: every file of the project with the first sentence of its docstring.

python tools/dev/tree.py
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs/tree.md"
FOLDERS = ("megatron", "tools", "examples", "tasks", "benchmarks", "tests")
HEAD = """# The tree

Every file and what it is for, from its own first sentence. Written by `tools/dev/tree.py`
(`make docs`); change the file, not this page.
"""


def render() -> str:
    """Return the page."""
    lines = [HEAD, "```"]
    shown: set[Path] = set()
    for path in described_files():
        relative = path.relative_to(ROOT)
        for folder in reversed(relative.parents[:-1]):
            if folder not in shown:
                shown.add(folder)
                lines.append(f"{'  ' * (len(folder.parts) - 1)}{folder.name}/")
        indented = "  " * (len(relative.parts) - 1) + relative.name
        lines.append(f"{indented:<46} {first_sentence(path)}".rstrip())
    return "\n".join([*lines, "```", ""])


def described_files() -> Iterator[Path]:
    """Yield Python, C++ and shell files in tree order, files of a folder before its folders."""
    yield from sorted(ROOT.glob("*.py"))
    for folder in FOLDERS:
        yield from _walk(ROOT / folder)


def _walk(folder: Path) -> Iterator[Path]:
    if not folder.is_dir() or folder.name == "__pycache__":
        return
    entries = sorted(folder.iterdir())
    for path in entries:
        if path.suffix in {".py", ".cpp", ".sh"} and path.stat().st_size:
            yield path
    for path in entries:
        yield from _walk(path)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's docstring or leading comment."""
    text = path.read_text()
    if path.suffix == ".py":
        comment = ast.get_docstring(ast.parse(text)) or ""
    else:
        rows = [row for row in text.splitlines() if not row.startswith("#!")]
        taken = []
        for row in rows:
            if not row.startswith(("#", "//")):
                break
            taken.append(row.lstrip("#/ "))
        comment = "\n".join(taken)
    paragraph = " ".join(comment.split("\n\n")[0].split())
    return re.split(r"(?<!e\.g)(?<!i\.e)\.(?:\s|$)|;\s", paragraph)[0]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(render())
