"""Write docs/matrix.md: which features combine, from the cases that the tests run.

python tools/matrix.py            write the page
python tools/matrix.py --check    exit 1 if it is not current
python tools/matrix.py --cover    choose cases anew for all pairs that can start
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.core.config.errors import ConfigError  # noqa: E402
from megatron.training.arguments.parser import parse_args  # noqa: E402
from megatron.training.arguments.resolve import resolve  # noqa: E402
from tools.layout_axes import FEATURES, Case, case_of, with_needs  # noqa: E402

TARGET = ROOT / "docs/matrix.md"
COVERING = ROOT / "tests/distributed/covering.txt"
MAX_RANKS = 8
LOW_PRECISION = ("precision", "reduced in")  # groups whose numbers are compared loosely
TESTED, ABSENT, UNTESTED = "T", "-", "?"
HEAD = """# What combines with what

Written by `tools/matrix.py` (`make tree`) from the cases that
`tests/distributed/test_layout_fuzz.py` runs; change those, not this page. Each case is the whole
application on up to 8 ranks, and its losses, gradients, gradient norms and weights are those of one
process.

**T**: a case has both. **-**: alternatives of each other. **R** with a number: a command line with
both is refused, with the sentence below.
"""

Pair = frozenset[str]


def main() -> int:
    """Write or check the page, or choose cases; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    parser.add_argument("--cover", action="store_true", help="write the list of cases")
    asked = parser.parse_args()
    if asked.cover:
        COVERING.write_text("".join(" ".join(sorted(c)) + "\n" for c in choose_cases()))
    page = render()
    if asked.check:
        is_current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == page
        print("docs/matrix.md is current" if is_current else "docs/matrix.md is old: run make tree")
        return 0 if is_current else 1
    TARGET.write_text(page, encoding="utf-8")
    return 0


def refusals(argv: Sequence[str], world_size: int) -> list[str]:
    """Why the command line cannot start, or which of its flags would do nothing."""
    try:
        run = resolve(parse_args(argv=list(argv)), world_size)
    except ConfigError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return [warning for warning in run.warnings if "without effect" in warning]


def cases() -> dict[str, Case]:
    """The covering list, by name."""
    lines = COVERING.read_text().splitlines()
    return {f"cover-{number:02}": case_of(line.split()) for number, line in enumerate(lines)}


def tested_pairs() -> set[Pair]:
    """Features that stand together in a case of the list."""
    return {p for case in cases().values() for p in _shown(case)}


def _shown(case: Case) -> Iterator[Pair]:
    """Pairs that a case proves; one of low precision, only those that have to do with it."""
    low = {name for name in case.features if FEATURES[name].group in LOW_PRECISION}
    for pair in combinations(case.features, 2):
        if not low or low.intersection(pair):
            yield frozenset(pair)


def cell(pair: Pair, tested: set[Pair]) -> str:
    """TESTED, ABSENT, UNTESTED, or the sentence with which a command line is refused."""
    if pair in tested:
        return TESTED
    one, other = sorted(pair)
    if FEATURES[one].group == FEATURES[other].group:
        return ABSENT
    problems = _problems(pair)
    return problems[0] if problems else UNTESTED


def untested() -> list[str]:
    """Pairs that a run accepts and no case has."""
    tested = tested_pairs()
    pairs = (frozenset(p) for p in combinations(FEATURES, 2))
    return [" + ".join(sorted(p)) for p in pairs if cell(p, tested) == UNTESTED]


def render() -> str:
    """The page."""
    tested, sentences = tested_pairs(), {}
    names = list(FEATURES)
    rows = [f"| | {' | '.join(str(i) for i in range(1, len(names)))} |"]
    rows.append("|---" * len(names) + "|")
    for number, name in enumerate(names, 1):
        texts = []
        for other in names[: number - 1]:
            text = cell(frozenset((name, other)), tested)
            if text not in (TESTED, ABSENT, UNTESTED):
                text = f"R{sentences.setdefault(text, len(sentences) + 1)}"
            texts.append(text)
        rows.append(f"| {number} {name} | {' | '.join(texts)} |")
    lines = [HEAD, *rows, "", "## Refused", ""]
    lines += [f"- R{number}: {text}" for text, number in sentences.items()]
    lines += ["", "## The features", ""]
    for f in FEATURES.values():
        flags = f.flags.format(**case_of([f.name]).numbers())
        lines.append(f"- {f.name}: {f'`{flags}`' if flags else f.words}")
    lines += ["", "## The cases", ""]
    lines += [f"- {n}: {' '.join(sorted(c.features))}" for n, c in cases().items()]
    return "\n".join(lines) + "\n"


def choose_cases() -> Iterator[Pair]:
    """Cases that show every pair that can start: each takes in as many new pairs as it can."""
    missing = {frozenset(p) for p in combinations(FEATURES, 2)}
    missing -= {p for p in missing if len({FEATURES[name].group for name in p}) == 1}
    missing -= {p for p in missing if _problems(p)}
    while missing:
        names = with_needs(max(missing, key=lambda p: (len(_new(p, missing)), sorted(p))))
        refused: set[str] = set()
        while (name := _best_addition(names, missing, refused)) is not None:
            if _problems({*names, name}):
                refused.add(name)
            else:
                names = with_needs({*names, name})
        if case_of(names).world_size == 1:  # it would be compared with itself
            names |= {"dp"}
        missing -= set(_shown(case_of(names)))
        yield case_of(names).features


def _best_addition(names: Pair, missing: set[Pair], refused: set[str]) -> str | None:
    """The feature that brings most new pairs, the first in order of the table."""
    groups = {FEATURES[name].group for name in names}
    gains = {
        name: len(_new({*names, name}, missing))
        for name, feature in FEATURES.items()
        if name not in refused and feature.group not in groups
    }
    best = max(gains, key=lambda name: gains[name], default=None)
    return best if best and gains[best] > len(_new(names, missing)) else None


def _new(names: Iterable[str], missing: set[Pair]) -> set[Pair]:
    return missing.intersection(_shown(Case(with_needs(names))))


def _problems(names: Iterable[str]) -> list[str]:
    """Why these cannot stand together."""
    given = set(names)
    case = case_of(given)
    groups = [FEATURES[name].group for name in case.features]
    if len(set(groups)) < len(groups):  # one needs an alternative of the other: left out
        case = Case(
            frozenset(
                n for n in case.features if n in given or groups.count(FEATURES[n].group) == 1
            )
        )
    if case.world_size > MAX_RANKS:
        return [f"{case.world_size} ranks are more than a test starts"]
    return refusals(case.command(), case.num_processes)


if __name__ == "__main__":
    sys.exit(main())
