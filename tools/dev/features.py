"""Write docs/features.md: one row for each feature that a test is marked to show.

A mark is ``@pytest.mark.feature("Area: sentence")``; marks are read from the source of the tests.

    python tools/dev/features.py
"""

from __future__ import annotations

import argparse
import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs/features.md"
HEAD = """# Features

Each row is a feature that a test shows. Written by `tools/dev/features.py` (`make docs`) from the
`feature` marks of the tests; change those, not this page.
"""


def render() -> str:
    """Return the page: a table in Markdown, areas and features in alphabetical order."""
    rows = [HEAD, "| area | feature | tests |", "|---|---|---|"]
    for (area, sentence), tests in sorted(collect().items()):
        files = ", ".join(f"[{Path(f).stem}](../{f})" for f in sorted(tests))
        rows.append(f"| {area} | {sentence} | {files} |")
    return "\n".join([*rows, ""])


@cache
def collect() -> dict[tuple[str, str], set[str]]:
    """Return (area, sentence) -> test files that have this mark."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.feature":
                area, _, sentence = ast.literal_eval(node.args[0]).partition(": ")
                key = (area, sentence)
                found.setdefault(key, set()).add(path.relative_to(ROOT).as_posix())
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(render())
