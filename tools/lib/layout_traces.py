"""Read what runs in several layouts have computed, and compare it, for compare_layouts.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Largest relative differences that rounding explains at the first step; they grow with the step.
# A gradient is compared with its norm, at least this share of the norm of all gradients: some are
# sums of roundings alone, such as those of the biases of keys.
PRECISIONS = {
    "fp32": {"loss": 2e-6, "norm": 5e-6, "gradient": 5e-5, "share": 1e-3},
    "fp16": {"loss": 1e-3, "norm": 5e-3, "gradient": 2e-2, "share": 1e-2},
    "bf16": {"loss": 5e-3, "norm": 2e-2, "gradient": 6e-2, "share": 1e-2},
    "fp8": {"loss": 1e-2, "norm": 6e-2, "gradient": 0.2, "share": 1e-2},
    "fp4": {"loss": 1e-2, "norm": 0.1, "gradient": 0.5, "share": 1e-2},
}
# Order of the values of a step, as a step computes them.
ORDER = ("weight", "loss", "gradient", "grad norm", "num zeros", "buffer", "params norm")
_NOT_COMPARED = re.compile(
    r"time|iteration|samples|batch.size|learning.rate|throughput|tokens/s|MFU|accuracy|mem-|world"
    r"|interval|power|energy|elapsed|skipped|hash"
)
_MISSING = 1e9  # relative difference of a value that only one side has; JSON has no infinity
_LINE = re.compile(r"\biteration\s+(\d+)/\s*\d+\s*\|(.*)")
_FIELD = re.compile(r"\s*(.+?):\s+(\S+)\s*$")


@dataclass(frozen=True)
class Sketch:
    """Numbers of a complete tensor (tools/lib/sketches.py)."""

    norm: float
    sums: tuple[float, ...]
    zeros: int = 0
    near: int = 0  # values that may be zero in another layout

    def distance(self, other: Sketch) -> float:
        """Return an estimate of the norm of the difference."""
        squares = [(a - b) ** 2 for a, b in zip(self.sums, other.sums, strict=True)]
        return max(math.sqrt(sum(squares) / len(squares)), abs(self.norm - other.norm))


@dataclass(frozen=True)
class Value:
    """A number of a run; ``resolution`` is that of its text."""

    number: float
    resolution: float = 0.0


@dataclass
class Trace:
    """What a run has computed: (step, kind, name) -> number or sketch of a tensor.

    ``contradictions``: values that contradict others of the same run.
    """

    numbers: dict[tuple[int, str, str], Value] = field(default_factory=dict)
    tensors: dict[tuple[int, str, str], Sketch] = field(default_factory=dict)
    contradictions: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """A value that differs by more than rounding explains; ``relative`` is the difference."""

    step: int
    kind: str
    name: str
    text: str
    relative: float
    allowed: float

    def __str__(self) -> str:
        size = f"{self.relative:.1e} relative, rounding explains {self.allowed:.0e}"
        return f"step {self.step}: {self.name}: {self.text} ({size})"


@dataclass
class Outcome:
    """Comparison of a layout with the first one."""

    layout: str
    differences: list[Difference]
    largest: dict[str, tuple[float, int]]  # row of the table -> relative difference and its step


# -- what a run has written -----------------------------------------------------------------


def read_folder(folder: Path) -> Trace:
    """Read the metrics file, or without one the log, and the recorded tensors of all ranks."""
    trace = Trace()
    metrics = folder / "metrics.jsonl"
    lines = (metrics if metrics.exists() else folder / "log.txt").read_text(errors="replace")
    for line in lines.splitlines():
        step, values = _values_of(line)
        for name, value in values.items():
            name = {"grad-norm": "grad norm", "num-zeros": "num zeros"}.get(name, name)
            name = "params norm" if name == "params-norm" else name
            kind = name if name in ORDER else "loss"
            trace.numbers[step, kind, name] = value
    by_rank: dict[tuple[int, str, str], dict[Any, list[tuple[int, Any]]]] = {}
    for path in sorted(folder.glob("tensors-*.jsonl"), key=lambda p: int(p.stem.split("-")[1])):
        rank = int(path.stem.split("-")[1])
        for line in path.read_text().splitlines():
            record = json.loads(line)
            for piece in record["pieces"]:
                place = tuple(piece["offset"]), tuple(piece["shape"])
                key = record["step"], record["kind"], piece["name"]
                by_rank.setdefault(key, {}).setdefault(place, []).append((rank, piece))
    for key, places in by_rank.items():
        pieces = [copies[0][1] for copies in places.values()]
        sums = zip(*(piece["sums"] for piece in pieces), strict=True)
        trace.tensors[key] = Sketch(
            math.hypot(*(piece["norm"] for piece in pieces)),
            tuple(map(sum, sums)),
            sum(piece["zeros"] for piece in pieces),
            sum(piece["near"] for piece in pieces),
        )
        trace.contradictions += _differing_copies(key, places)
    trace.contradictions += _wrong_totals(trace)
    return trace


def _values_of(line: str) -> tuple[int, dict[str, Value]]:
    """Return step and values of a line of a metrics file or a log; no values of other lines."""
    if line.startswith("{"):
        record = json.loads(line)
        texts = {k: str(v) for k, v in record.items() if isinstance(v, (int, float, str))}
        if texts.pop("kind") != "step":
            return 0, {}
        step = int(record["iteration"])
    else:
        found = _LINE.search(line)
        fields = [_FIELD.match(part) for part in found[2].split("|")] if found else []
        texts = {match[1]: match[2] for match in fields if match}
        step = int(found[1]) if found else 0
    is_text = not line.startswith("{")
    return step, {
        name: Value(float(text), _resolution(text) if is_text else 0.0)
        for name, text in texts.items()
        if not _NOT_COMPARED.search(name)
    }


def _resolution(text: str) -> float:
    """Return the unit of the last digit of a printed number."""
    digits, _, exponent = text.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    return (
        float(10.0 ** (int(exponent or 0) - decimals))
        if exponent.lstrip("+-").isdigit() or not exponent
        else 0.0
    )


def _differing_copies(
    key: tuple[int, str, str], places: Mapping[Any, list[tuple[int, Any]]]
) -> Iterator[Difference]:
    """Yield the first copy of a piece that is not equal on all ranks that hold it."""
    step, kind, name = key
    for (_, _), ((first, piece), *others) in places.items():
        wanted = Sketch(piece["norm"], tuple(piece["sums"]))
        for rank, other in others:
            distance = Sketch(other["norm"], tuple(other["sums"])).distance(wanted)
            relative = distance / wanted.norm if wanted.norm else _MISSING if distance else 0.0
            if not relative <= 1e-5:
                text = f"ranks {first} and {rank} hold different copies"
                yield Difference(step, kind, f"{kind} of {name}", text, relative, 1e-5)
                return


def _wrong_totals(trace: Trace) -> Iterator[Difference]:
    """Yield the norms and zero counts of the log that are not those of the recorded gradients."""
    for (step, kind, name), logged in trace.numbers.items():
        if kind not in ("grad norm", "num zeros"):
            continue
        gradients = [s for (i, k, _), s in trace.tensors.items() if (i, k) == (step, "gradient")]
        norm = math.hypot(*(sketch.norm for sketch in gradients))
        total = norm if kind == "grad norm" else float(sum(s.zeros for s in gradients))
        relative = abs(logged.number - total) / (total or 1.0)
        allowed = 1e-6 if kind == "grad norm" else 0.0
        if gradients and not relative <= allowed:
            text = f"{logged.number:.8g}, of the gradients of all ranks {total:.8g}"
            yield Difference(step, kind, name, text, relative, allowed)


# -- comparison -----------------------------------------------------------------------------


def compare(name: str, first: Trace, other: Trace, limits: Mapping[str, float]) -> Outcome:
    """Compare the run of a layout with the first one."""
    outcome = Outcome(name, [], {})
    wanted = [*_compare_numbers(first, other, limits), *_compare_tensors(first, other, limits)]
    for row, difference in wanted:
        largest = outcome.largest.get(row, (-1.0, 0))
        if not difference.relative <= largest[0]:
            outcome.largest[row] = difference.relative, difference.step
        if not difference.relative <= difference.allowed:
            outcome.differences.append(difference)
    outcome.differences += other.contradictions
    outcome.differences.sort(key=lambda d: (d.step, ORDER.index(d.kind)))
    return outcome


def _compare_numbers(
    first: Trace, other: Trace, limits: Mapping[str, float]
) -> Iterator[tuple[str, Difference]]:
    for (step, kind, name), wanted in first.numbers.items():
        found = other.numbers.get((step, kind, name))
        if found is None:
            yield name, Difference(step, kind, name, "it is missing", _MISSING, 0.0)
            continue
        pair = found.number, wanted.number
        apart = abs(pair[0] - pair[1])
        if pair[0] == pair[1] or (math.isnan(pair[0]) and math.isnan(pair[1])):
            apart = 0.0
        # Small values are often differences of larger ones, such as rewards.
        size = max(abs(pair[1]), 1.0) if kind == "loss" else abs(pair[1])
        allowed = limits["loss" if kind == "loss" else "norm"] * step * size
        if kind == "num zeros":
            noise = [
                s.near
                for t in (first, other)
                for k, s in t.tensors.items()
                if k[:2] == (step, "gradient")
            ]
            allowed = sum(noise) if noise else 0.01 * pair[1]
        allowed += 2 * max(found.resolution, wanted.resolution)
        scale = abs(pair[1]) or 1.0
        text = f"{pair[0]:.8g}, in the first layout {pair[1]:.8g}"
        yield name, Difference(step, kind, name, text, apart / scale, allowed / scale)


def _compare_tensors(
    first: Trace, other: Trace, limits: Mapping[str, float]
) -> Iterator[tuple[str, Difference]]:
    totals: dict[tuple[int, str], float] = {}
    for (step, kind, _), sketch in first.tensors.items():
        totals[step, kind] = math.hypot(totals.get((step, kind), 0.0), sketch.norm)
    for (step, kind, name), wanted in first.tensors.items():
        found = other.tensors.get((step, kind, name))
        row = f"{kind}s"
        if found is None:
            text = "no rank holds it"
            yield row, Difference(step, kind, f"{kind} of {name}", text, _MISSING, 0.0)
            continue
        share = limits["share"] if kind == "gradient" else 0.0
        scale = max(wanted.norm, share * totals[step, kind]) or 1.0
        allowed = limits["gradient"] * step if kind == "gradient" else 1e-5
        text = f"norm {found.norm:.8g}, in the first layout {wanted.norm:.8g}"
        relative = found.distance(wanted) / scale
        yield row, Difference(step, kind, f"{kind} of {name}", text, relative, allowed)
