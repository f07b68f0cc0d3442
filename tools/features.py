"""Write README's table of what works: one row for each sentence that a test vouches for.

A test says so with ``@pytest.mark.feature("Area: sentence")``; the rows are read from the source.

    python tools/features.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- features: written by tools/features.py -->", "<!-- end of features -->"


def main() -> None:
    """Write the table."""
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")


def table() -> str:
    """The table in Markdown, areas and sentences in alphabetical order."""
    rows = ["| area | what works | tests |", "|---|---|---|"]
    for (area, sentence), tests in sorted(collect().items()):
        files = ", ".join(f"[{Path(f).stem}]({f})" for f in sorted(tests))
        rows.append(f"| {area} | {sentence} | {files} |")
    return "\n".join(rows)


def collect() -> dict[tuple[str, str], set[str]]:
    """(area, sentence) -> test files that carry the mark."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.feature":
                area, _, sentence = ast.literal_eval(node.args[0]).partition(": ")
                key = (area, sentence)
                found.setdefault(key, set()).add(path.relative_to(ROOT).as_posix())
    return found


if __name__ == "__main__":
    main()
