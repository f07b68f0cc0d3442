"""Write docs/matrix.md: which features combine, from the cases that the tests run.

python tools/dev/matrix.py            write the page
python tools/dev/matrix.py --cover    add cases for pairs that a run accepts and no case covers
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.core.config.errors import ConfigError  # noqa: E402
from megatron.training.arguments.parser import parse_args  # noqa: E402
from megatron.training.arguments.resolve import resolve  # noqa: E402
from tools.dev.lib.layout_axes import FEATURES, Case, case_of, with_needs  # noqa: E402

TARGET = ROOT / "docs/matrix.md"
COVERING = ROOT / "tests/distributed/covering.txt"
PAIRED = {name: feature for name, feature in FEATURES.items() if feature.is_paired}
MAX_RANKS = 8
LOW_PRECISION = ("precision", "reduced in")  # groups compared with larger tolerances
ORDINARY = 18  # cases of `make test`; `make test-slow` runs the others, each for fewer new pairs
TESTED, TESTED_SLOWLY, ABSENT, UNTESTED = "T", "t", "-", "?"
HEAD = """# What combines with what

Written by `tools/dev/matrix.py` (`make docs`) from the cases that
`tests/distributed/test_layout_fuzz.py` runs; change those, not this page. Each case is the whole
application on up to 8 ranks, threads of one process where it has virtual-ranks and processes
elsewhere; its losses, gradients, norms, counts of zeros and weights are those of one process.

**T**: a case of the ordinary tests has both. **t**: only one of `make test-slow` has both. **-**:
alternatives of each other. **R** with a number: a command line with both is refused, with the
sentence below.
"""

Pair = frozenset[str]


def main() -> None:
    """Write the page; with --cover, choose further cases first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cover", action="store_true", help="add to the list of cases")
    asked = parser.parse_args()
    if asked.cover:
        more = [" ".join(sorted(c)) + "\n" for c in choose_cases()]
        COVERING.write_text(COVERING.read_text() + "".join(more))
    TARGET.write_text(render(), encoding="utf-8")


def refusals(argv: Sequence[str], world_size: int) -> list[str]:
    """Return why the command line cannot start, or which of its flags have no effect."""
    try:
        run = resolve(parse_args(argv=list(argv)), world_size)
    except ConfigError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return [warning for warning in run.warnings if "without effect" in warning]


def cases() -> dict[str, Case]:
    """Return the covering list, by name."""
    lines = COVERING.read_text().splitlines()
    return {f"cover-{number:02}": case_of(line.split()) for number, line in enumerate(lines)}


def slow_cases() -> list[str]:
    """Return the names of the cases that the ordinary tests omit."""
    return list(cases())[ORDINARY:]


def tested_pairs() -> dict[Pair, str]:
    """Return pairs of features that a case of the list combines -> how they are tested."""
    slow = slow_cases()
    return {
        pair: TESTED_SLOWLY if name in slow else TESTED
        for name, case in reversed(cases().items())
        for pair in _shown(case)
    }


def _shown(case: Case) -> Iterator[Pair]:
    """Yield pairs that a case tests; in low precision only those with a low-precision feature."""
    low = {name for name in case.features if FEATURES[name].group in LOW_PRECISION}
    for pair in combinations(case.features, 2):
        if not low or low.intersection(pair):
            yield frozenset(pair)


def cell(pair: Pair, tested: dict[Pair, str]) -> str:
    """Return how a pair is tested, ABSENT, UNTESTED, or why its command line is refused."""
    if pair in tested:
        return tested[pair]
    one, other = sorted(pair)
    if FEATURES[one].group == FEATURES[other].group:
        return ABSENT
    problems = _problems(pair)
    return problems[0] if problems else UNTESTED


def untested() -> list[str]:
    """Return pairs that a run accepts and no case covers."""
    tested = tested_pairs()
    return [" + ".join(sorted(p)) for p in _pairs() if cell(p, tested) == UNTESTED]


def render() -> str:
    """Return the page."""
    tested, sentences = tested_pairs(), {}
    names = list(PAIRED)
    rows = [f"| | {' | '.join(str(i) for i in range(1, len(names)))} |"]
    rows.append("|---" * len(names) + "|")
    for number, name in enumerate(names, 1):
        texts = []
        for other in names[: number - 1]:
            text = cell(frozenset((name, other)), tested)
            if len(text) > 1:
                text = f"R{sentences.setdefault(text, len(sentences) + 1)}"
            texts.append(text)
        rows.append(f"| {number} {name} | {' | '.join(texts)} |")
    lines = [HEAD, *rows, "", "## Refused", ""]
    lines += [f"- R{number}: {text}" for text, number in sentences.items()]
    lines += ["", "## The features", ""]
    for f in PAIRED.values():
        flags = f.flags.format(**case_of([f.name]).numbers())
        lines.append(f"- {f.name}: {f'`{flags}`' if flags else f.words}")
    lines += ["", "## The cases", ""]
    for name, case in cases().items():
        mark = " (slow)" if name in slow_cases() else ""
        lines.append(f"- {name}{mark}: {' '.join(sorted(case.features))}")
    return "\n".join(lines) + "\n"


def choose_cases() -> Iterator[Pair]:
    """Yield cases that cover untested pairs: repeatedly the candidate with most pairs per cost."""
    rng, tested = random.Random(0), tested_pairs()
    missing = {pair for pair in _pairs() if cell(pair, tested) == UNTESTED}
    suits = _partners(missing.union(tested))
    while missing:
        left = _partners(missing)
        cases = [
            _fill(start, suits, left, max_ranks, rng)
            for pair in rng.choices(sorted(missing, key=sorted), k=5)
            for start in (with_needs(pair), with_needs(pair | {"virtual-ranks"}))
            if not _problems(start)
            for max_ranks in ((2, 4, MAX_RANKS) if start == with_needs(pair) else (MAX_RANKS,))
            if case_of(start).world_size <= max_ranks
        ]
        best = max(cases, key=lambda case: len(missing.intersection(_shown(case))) / _cost(case))
        missing -= set(_shown(best))
        yield best.features


def _pairs() -> Iterator[Pair]:
    """Yield all pairs of features except alternatives of each other."""
    for one, other in combinations(PAIRED.values(), 2):
        if one.group != other.group:
            yield frozenset((one.name, other.name))


def _partners(pairs: set[Pair]) -> dict[str, set[str]]:
    """Return for each feature itself and the features that it has a pair with."""
    return {name: {name}.union(*(pair for pair in pairs if name in pair)) for name in PAIRED}


def _cost(case: Case) -> float:
    """Return processes to start, the one to compare with, and a part for each rank."""
    return 1 + case.num_processes + 0.3 * case.world_size


def _fill(
    names: Pair,
    suits: dict[str, set[str]],
    left: dict[str, set[str]],
    max_ranks: int,
    rng: random.Random,
) -> Case:
    """Add to ``names``, repeatedly, the feature that covers most of the pairs ``left``."""
    low = {name for name in names if FEATURES[name].group in LOW_PRECISION}
    steps = [names]
    while gains := {
        wider: gain
        for name in rng.sample(list(PAIRED), len(PAIRED))
        if low or FEATURES[name].group not in LOW_PRECISION
        for wider in [names | with_needs([name])]
        if (gain := sum(len(left[n] & (low or wider) - {n}) for n in wider - names)) > 0
        if all(wider <= suits[n] for n in wider - names)
        if case_of(wider).world_size <= max_ranks
    }:
        names = max(gains, key=lambda wider: gains[wider])
        steps.append(names)
    while _problems(steps[-1]):  # conflicts of more than two features
        steps.pop()
    case = case_of(steps[-1])
    return case if case.world_size > 1 else case_of(steps[-1] | {"dp"})  # one rank is the reference


@cache
def _problems(given: Pair) -> list[str]:
    """Return why these features cannot be combined; [] if they can."""
    case = case_of(given)
    groups = [FEATURES[name].group for name in case.features]
    if len(set(groups)) < len(groups):  # a needed feature is an alternative of a given one: drop it
        case = Case(
            frozenset(
                n for n in case.features if n in given or groups.count(FEATURES[n].group) == 1
            )
        )
    if case.world_size > MAX_RANKS:
        return [f"{case.world_size} ranks are more than a test starts"]
    return refusals(case.command(), case.num_processes)


if __name__ == "__main__":
    main()
