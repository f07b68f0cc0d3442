"""Write README's table of what works: one row for each sentence that a test vouches for.

A test says so with ``@pytest.mark.feature("Area: sentence")``; the rows are read from the source.

    python tools/features.py            write the table
    python tools/features.py --check    exit 1 if it is not current
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- features: written by tools/features.py -->", "<!-- end of features -->"


def main() -> int:
    """Write or check the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    check = parser.parse_args().check
    old = README.read_text()
    before, _, rest = old.partition(BEGIN)
    new = f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"
    if check:
        print("the table is current" if new == old else "README's table is old: run make tree")
        return 0 if new == old else 1
    README.write_text(new)
    return 0


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
    raise SystemExit(main())
