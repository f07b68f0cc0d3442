"""Write every logged value as JSON, one object per line (--metrics-file).

A line has ``kind`` (step, validation or test), ``iteration``, ``consumed_samples``, ``time``
(seconds since the epoch) and the values by TensorBoard tag.  ``interval`` holds the fields of the
console line of that step.  NaN and infinities are the strings "NaN", "Infinity", "-Infinity": the
file is strict JSON.  Each line is one write, so that a reader sees complete lines only, even after
a kill.  A resumed run truncates the lines after the iteration that it continues from.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from typing import Any, BinaryIO

from megatron.training.callbacks.records import EvalRecord, Sink, StepRecord

logger = logging.getLogger(__name__)


class MetricsFileSink(Sink):
    """Append metrics to ``path``; the run starts from ``iteration``."""

    name = "metrics file"

    def __init__(self, path: str, iteration: int) -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.isfile(path) and not path.startswith("/dev/"):
            if iteration == 0 or not _is_metrics_file(path):
                if os.path.getsize(path):
                    os.replace(path, path + ".previous")
                    told = {"all_ranks": True}
                    logger.info("what was in %s is now in %s.previous", path, path, extra=told)
            else:
                cut_after(path, iteration)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115

    def write_step(self, record: StepRecord) -> None:
        line = {**_head("step", record), **record.losses, **record.values}
        if record.interval is not None:
            line["interval"] = dict(record.interval)
        self._write(line)

    def write_eval(self, record: EvalRecord) -> None:
        line = _head(record.split, record)
        line["final"] = record.is_final
        self._write(line | record.tagged)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write((json.dumps(_strict(line), allow_nan=False) + "\n").encode())


def cut_after(path: str, iteration: int) -> None:
    """Truncate the file after the lines up to ``iteration``, and before an incomplete last line.

    The final evaluations of the former run are removed too, because the resumed run repeats them.
    """
    keep = 0
    with open(path, "rb") as file:
        for line in file:
            if not _is_kept(line, iteration):
                break
            keep += len(line)
    if keep < os.path.getsize(path):
        os.truncate(path, keep)


def _is_metrics_file(path: str) -> bool:
    """Return whether the first line is one of ours; files of others are never truncated."""
    with open(path, "rb") as file:
        line = file.readline()
    is_cut = not line.endswith(b"\n")
    return line.startswith(b"{") if is_cut else _is_kept(line, sys.maxsize)


def _is_kept(line: bytes, iteration: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        values = json.loads(line)
        last = iteration - 1 if values.get("final") else iteration
        return int(values["iteration"]) <= last
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _head(kind: str, record: StepRecord | EvalRecord) -> dict[str, Any]:
    return {
        "kind": kind,
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "time": round(time.time(), 3),
    }


def _strict(value: Any) -> Any:
    """Return ``value`` with numbers that JSON lacks as strings."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
