"""Write a corpus from the text of the installed Python standard library.

Writes ``train.jsonl`` and ``valid.jsonl`` into the given folder, one JSON line for each file, as
preprocess_data.py reads them.  Tests and tables of characters are left out.  About 9 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
VALID_PART = 20  # every 20th file


def main() -> int:
    """Write both files; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write to; it is created")
    folder: Path = parser.parse_args().folder
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(library.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(library).parts) and path.stat().st_size
    ]
    random.Random(1234).shuffle(files)  # files of a folder are alike: validate on all folders
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("valid", files[::VALID_PART]), ("train", _without_every_nth(files))):
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in part]
        rows = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
        size = sum(map(len, texts)) / 1e6
        print(f"{name}: {len(texts)} files, {size:.1f} MB of text from {library}")
    return 0


def _without_every_nth(files: list[Path]) -> list[Path]:
    return [path for i, path in enumerate(files) if i % VALID_PART]


if __name__ == "__main__":
    raise SystemExit(main())
