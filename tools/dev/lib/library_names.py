"""Count the names of Megatron Core that public projects import and that this checkout has.

python -m tools.dev.lib.library_names prints a table: a row for each project, by
tests/golden/library_api.json; a file counts once for each name that it imports.
"""

from __future__ import annotations

import importlib
import json
from collections import defaultdict
from pathlib import Path

RECORD = Path(__file__).resolve().parents[3] / "tests/golden/library_api.json"


def main() -> None:
    """Print the table."""
    names = json.loads(RECORD.read_text())["names"]
    found = {place for place in names if resolves(place)}
    counts: dict[str, list[int]] = defaultdict(lambda: [0] * 8)
    for place, entry in names.items():
        for project, files in (*entry["files"].items(), ("all", sum(entry["files"].values()))):
            start = 0 if entry["release"] == "v0.14" else 4
            has = place in found
            for offset, number in enumerate((has, 1, has * files, files)):
                counts[project][start + offset] += number
    print("| project | names of v0.14 | by files | later names | by files |\n|---|---|---|---|---|")
    for project, row in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        cells = (f"{row[i]} of {row[i + 1]}" for i in range(0, 8, 2))
        print(f"| {project} | {' | '.join(cells)} |")


def resolves(place: str) -> bool:
    """Return whether "module:name" can be imported."""
    module, _, name = place.partition(":")
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    main()
