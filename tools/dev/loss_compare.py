"""Compare the losses of two runs bit for bit, to show that a refactor changes no result.

    python tools/dev/loss_compare.py old.log new.log
    python tools/dev/loss_compare.py old.jsonl new.jsonl
    python tools/dev/loss_compare.py --run "python pretrain_gpt.py ..." \\
        "python old/pretrain_gpt.py ..."

A file is the console output of a run, which shows seven digits, or its ``--metrics-file``, which
has every bit.  ``--run`` starts both commands with a metrics file of their own.  Exit code 0:
equal; 1: different; 2: nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_FIELD = re.compile(r" ([\w .-]+?): +(\S+) \|")
_COMPARED = re.compile(r"(.*loss|grad norm)$")
_NOT_COMPARED = {"loss scale"}

# iteration -> name -> the value as text
Curve = dict[int, dict[str, str]]


@dataclass(frozen=True)
class Difference:
    """A value that differs between the runs."""

    iteration: int
    name: str
    old: str
    new: str

    def __str__(self) -> str:
        relative = abs(float(self.old) - float(self.new)) / max(abs(float(self.old)), 1e-30)
        return (
            f"iteration {self.iteration}: {self.name} {self.old} is now {self.new} "
            f"({relative:.1e} relative)"
        )


def main(argv: list[str] | None = None) -> int:
    """Compare, print the first differences, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="file, or with --run a command")
    parser.add_argument("new", help="file, or with --run a command")
    parser.add_argument("--run", action="store_true", help="the two words are commands")
    parser.add_argument(
        "--common", action="store_true", help="only iterations that both have, one at least"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        curves = []
        for name in ("old", "new"):
            source = getattr(options, name)
            path = run(source, Path(scratch) / f"{name}.jsonl") if options.run else Path(source)
            curves.append(read(path))
    return report(*curves, common_only=options.common)


def run(words: str, metrics: Path) -> Path:
    """Run the command with a metrics file; return the path of the file."""
    command = [*shlex.split(words), "--metrics-file", str(metrics)]
    print(shlex.join(command), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return metrics


def read(path: Path) -> Curve:
    """Return losses and gradient norms of each iteration in a log or a metrics file."""
    curve: Curve = {}
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            record = json.loads(line, parse_float=str, parse_int=str)
            iteration, fields = record.get("iteration"), record
        else:
            found = _ITERATION.search(line)
            iteration = found[1] if found else None
            fields = dict(_FIELD.findall(line[found.end() - 2 :])) if found else {}
        numbers = {
            name: value
            for name, value in fields.items()
            if isinstance(value, str) and _COMPARED.fullmatch(name) and name not in _NOT_COMPARED
        }
        if iteration is not None and numbers:
            curve.setdefault(int(iteration), {}).update(numbers)
    return curve


def differences(old: Curve, new: Curve) -> list[Difference]:
    """Return every value that both runs have but as different text, in order of iterations."""
    return [
        Difference(iteration, name, value, new[iteration][name])
        for iteration in sorted(old.keys() & new.keys())
        for name, value in old[iteration].items()
        if name in new[iteration] and new[iteration][name] != value
    ]


def report(old: Curve, new: Curve, common_only: bool = False) -> int:
    """Print the result; return the exit code."""
    both = old.keys() & new.keys()
    if not both:
        print("loss_compare: no iteration stands in both", file=sys.stderr)
        return 2
    only_one = sorted(old.keys() ^ new.keys())
    if only_one and not common_only:
        print(f"iterations that only one run has: {only_one[:10]}; --common compares the rest")
        return 1
    different = differences(old, new)
    for difference in different[:10]:
        print(difference)
    if different:
        print(f"{len(different)} numbers differ in {len(both)} iterations")
        return 1
    names = sorted({name for iteration in both for name in old[iteration]})
    print(f"{len(both)} iterations are equal in every digit: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
