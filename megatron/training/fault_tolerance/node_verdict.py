"""Decide from the measurements of all ranks which nodes are slow or wrong (tools/check_node.py).

Ranks are compared with those of like devices and with stored expectations.  Pure Python.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.config.errors import ConfigError

# Rate -> unit.  Larger is better.
RATES = {
    "matmul": "TFLOP/s",
    "memory": "GB/s",
    "all-reduce in the node": "GB/s",
    "link to other nodes": "GB/s",
    "disk write": "MB/s",
    "disk read": "MB/s",
}
_SHARED = ("disk write", "disk read")  # others use the disk too: half the threshold applies


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Measurements of one rank; a check that failed is in ``problems`` instead."""

    rank: int
    node: str
    device: str
    rates: dict[str, float] = field(default_factory=dict)
    bits: str = ""  # hash of the results of fixed computations
    clock_offset_s: float = 0.0  # to rank 0
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Finding:
    """Reason why a node is unhealthy."""

    node: str
    rank: int
    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.node}, rank {self.rank}: {self.check}: {self.text}"


@dataclass(frozen=True)
class Thresholds:
    """Limits of what counts as healthy."""

    slow_below: float = 0.7  # share of the rate of like devices
    clock_offset_s: float = 1.0


def findings(
    results: Sequence[RankResult],
    expected: Mapping[str, Mapping[str, Any]],
    thresholds: Thresholds,
) -> list[Finding]:
    """Return why nodes are unhealthy, in the order of nodes and ranks.

    ``expected`` has rates and bits by device, as `expectations` returns them.
    """
    by_device: dict[str, list[RankResult]] = defaultdict(list)
    for result in results:
        by_device[result.device].append(result)
    found = list(_failed(results))
    for device, alike in by_device.items():
        found += _slow(alike, expected.get(device, {}), thresholds.slow_below)
        found += _wrong(alike, expected.get(device, {}))
    for result in results:
        if abs(result.clock_offset_s) > thresholds.clock_offset_s:
            text = (
                f"{result.clock_offset_s:+.1f} s to rank 0, at most {thresholds.clock_offset_s} s"
            )
            found.append(Finding(result.node, result.rank, "clock", text))
    return sorted(found)


def expectations(results: Iterable[RankResult]) -> dict[str, dict[str, Any]]:
    """Return the typical rates and the bits of each device, to compare later runs with."""
    by_device: dict[str, list[RankResult]] = defaultdict(list)
    for result in results:
        by_device[result.device].append(result)
    stored = {}
    for device, alike in by_device.items():
        rates = {r: _typical(alike, r) for r in RATES if any(r in one.rates for one in alike)}
        bits, count = Counter(result.bits for result in alike).most_common(1)[0]
        stored[device] = {"rates": rates, "bits": bits if 2 * count > len(alike) else ""}
    return stored


def read_expectations(path: Path) -> dict[str, dict[str, Any]]:
    """Return the stored expectations.  Raises ConfigError."""
    try:
        stored: dict[str, dict[str, Any]] = json.loads(path.read_text())
        is_valid = isinstance(stored, dict) and all(
            isinstance(one, dict)
            and isinstance(one.get("bits"), str)
            and isinstance(one.get("rates"), dict)
            and all(isinstance(rate, int | float) for rate in one["rates"].values())
            for one in stored.values()
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--expect {path}: it cannot be read ({error})") from None
    if not is_valid:
        raise ConfigError(f"--expect {path}: it is no file that --save-expectations has written")
    return stored


def table(results: Sequence[RankResult]) -> Iterator[str]:
    """Yield the lines of the table of measurements."""
    shown = [rate for rate in RATES if any(rate in result.rates for result in results)]
    heads = [f"{rate} ({RATES[rate]})" for rate in shown]
    cells = [("rank", "node", "device", *heads, "clock (ms)")]
    for result in results:
        rates = [f"{result.rates[r]:.3g}" if r in result.rates else "-" for r in shown]
        clock = f"{1e3 * result.clock_offset_s:+.0f}"
        cells.append((str(result.rank), result.node, result.device, *rates, clock))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def as_json(results: Sequence[RankResult], found: Sequence[Finding]) -> str:
    """Return the report for programs."""
    unhealthy = sorted({finding.node for finding in found})
    report = {
        "healthy": not found,
        "unhealthy_nodes": unhealthy,
        "findings": [asdict(finding) for finding in found],
        "ranks": [asdict(result) for result in results],
    }
    return json.dumps(report)


def _failed(results: Sequence[RankResult]) -> Iterator[Finding]:
    """Yield the failed checks; of a collective only on ranks that others have waited for."""
    for check in sorted({check for result in results for check in result.problems}):
        failed = [result for result in results if check in result.problems]
        absent = [r for r in failed if "waits in" not in r.problems[check]]
        for result in absent or failed:
            yield Finding(result.node, result.rank, check, result.problems[check])


def _slow(
    alike: Sequence[RankResult], expected: Mapping[str, Any], slow_below: float
) -> Iterator[Finding]:
    for rate, unit in RATES.items():
        measured = [result for result in alike if rate in result.rates]
        if not measured:
            continue
        stored = expected.get("rates", {}).get(rate)
        references = [(_typical(alike, rate), "like devices have")]
        if stored is not None:
            references.append((float(stored), "expected are"))
        share = slow_below / 2 if rate in _SHARED else slow_below
        for result in measured:
            for reference, words in references:
                if result.rates[rate] < share * reference:
                    text = (
                        f"{result.rates[rate]:.3g} {unit}, {words} {reference:.3g} (limit "
                        f"{share:.0%})"
                    )
                    yield Finding(result.node, result.rank, rate, text)
                    break


def _wrong(alike: Sequence[RankResult], expected: Mapping[str, Any]) -> Iterator[Finding]:
    computed = [result for result in alike if result.bits]
    if not computed:
        return
    right, count = Counter(result.bits for result in computed).most_common(1)[0]
    words = "fixed computations give other bits than on most like devices"
    if 2 * count <= len(computed):
        words = "fixed computations give different bits on like devices, without a majority"
        right = ""
    if expected.get("bits"):
        words = "fixed computations give other bits than expected"
        right = expected["bits"]
    for result in computed:
        if result.bits != right:
            yield Finding(result.node, result.rank, "matmul", f"{words}: its results are wrong")


def _typical(alike: Sequence[RankResult], rate: str) -> float:
    """Return the median, of an even number of ranks the upper one: of two the faster is right."""
    rates = sorted(result.rates[rate] for result in alike if rate in result.rates)
    return rates[len(rates) // 2]
