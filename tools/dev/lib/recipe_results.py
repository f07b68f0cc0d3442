"""Compare the metrics of a recipe's run with golden values.

A golden file maps a metric (a TensorBoard tag) to its values::

    {"lm loss": {"start_step": 1, "end_step": 100, "step_interval": 5, "values": {"1": 10.8}}}

``values`` may also be a list, which begins at ``start_step`` in steps of ``step_interval``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.core.config.errors import DataError

DEFAULT_METRICS = ("iteration-time", "lm loss", "num-zeros")
# Golden values come from other kernels in other orders of sums: losses agree within 5 %.
RELATIVE_TOLERANCE = 0.05
# Depend on the machine: not compared.
_OF_THE_MACHINE = ("iteration-time", "mem-")

# metric -> step -> value
Metrics = dict[str, dict[int, float]]


def golden_beside(recipe: Path) -> Path | None:
    """Return the golden file in the folder of ``recipe``; None unless there is exactly one."""
    found = sorted(recipe.parent.glob("golden_values*.json"))
    return found[0] if len(found) == 1 else None


def read_metrics(path: Path) -> Metrics:
    """Return the values of each training step in a ``--metrics-file``."""
    metrics: Metrics = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record.get("kind") != "step":
            continue
        for name, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                metrics.setdefault(name, {})[int(record["iteration"])] = float(value)
    return metrics


def read_golden(path: Path) -> Metrics:
    """Return the values of a golden file, without those that are not finite."""
    try:
        content = json.loads(path.read_text())
        return {name: dict(_steps(entry)) for name, entry in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: no golden values: {error}") from None


def _steps(entry: dict[str, Any]) -> Iterator[tuple[int, float]]:
    values = entry["values"]
    if isinstance(values, list):
        first, interval = int(entry.get("start_step", 0)), int(entry.get("step_interval", 1))
        values = {first + i * interval: value for i, value in enumerate(values)}
    for step, value in values.items():
        number = float(value)
        if math.isfinite(number):
            yield int(step), number


def compare_with_golden(golden: Path | None, metrics_file: Path, names: Sequence[str]) -> int:
    """Print whether a run agrees with its golden values; return 1 if a metric does not."""
    if golden is None:
        print("no golden values: nothing is compared with them")
        return 0
    return report(golden, read_golden(golden), metrics_file, names)


def report(source: Path, wanted: Metrics, metrics_file: Path, names: Sequence[str]) -> int:
    """Print whether the run of ``metrics_file`` agrees with ``wanted``, read from ``source``."""
    problems = list(differences(wanted, read_metrics(metrics_file), names))
    for problem in problems:
        print(f"{source.name}: {problem}", file=sys.stderr)
    if not problems:
        print(f"{', '.join(names)}: as in {source}")
    return 1 if problems else 0


def differences(golden: Metrics, run: Metrics, names: Sequence[str]) -> Iterator[str]:
    """Yield a message for each metric of ``names`` that differs, with the first such step."""
    for name in names:
        if name.startswith(_OF_THE_MACHINE):
            continue
        wanted, found = golden.get(name), run.get(name)
        if wanted is None or found is None:
            yield f"{name} is not in the {'golden values' if wanted is None else 'run'}"
            continue
        common = sorted(wanted.keys() & found.keys())
        if not common:
            yield f"{name}: no step is in both the golden values and the run"
        for step in common:
            bound = RELATIVE_TOLERANCE * abs(wanted[step])
            if not abs(found[step] - wanted[step]) <= bound:
                yield (
                    f"{name} at step {step} is {found[step]:g}, and {wanted[step]:g} is wanted: "
                    f"more than {RELATIVE_TOLERANCE:.0%} apart"
                )
                break
