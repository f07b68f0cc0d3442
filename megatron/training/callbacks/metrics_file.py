"""--metrics-file: every number that is logged anywhere, one JSON object a line.

A line holds ``kind`` (step, validation or test), ``iteration``, ``consumed_samples``, ``time``
(seconds since the epoch) and the numbers under their TensorBoard tags; ``interval`` holds what the
console line of that step says.  NaN and infinities are the strings "NaN", "Infinity", "-Infinity":
the file is strict JSON.  Each line is written at once, so that a reader or a kill meets whole
lines.  A resumed run cuts off what a former one wrote behind the iteration it continues from.
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
    """Appends to ``path``; ``iteration`` is the one the run starts from."""

    name = "metrics file"

    def __init__(self, path: str, iteration: int) -> None:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.isfile(path) and not path.startswith("/dev/"):
            if iteration == 0 or not _is_metrics_file(path):
                _set_aside(path)
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
        for key, perplexity in record.perplexities.items():
            tag = f"{key} {record.split}{record.suffix}"
            line[tag] = record.losses[key]
            line[f"{tag} ppl"] = perplexity
        self._write(line)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write((json.dumps(_strict(line), allow_nan=False) + "\n").encode())


def cut_after(path: str, iteration: int) -> None:
    """Remove the lines behind ``iteration``, and a last line that was not written completely.

    The evaluations at the end of the former run are repeated, so they go too.
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
    """Whether the first line is one of ours; a file of somebody else is never cut."""
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


def _set_aside(path: str) -> None:
    """Leave the file of an earlier run, or whatever else stands there, beside the new one."""
    if os.path.getsize(path):
        os.replace(path, path + ".previous")
        logger.info("what was in %s is now in %s.previous", path, path, extra={"all_ranks": True})


def _head(kind: str, record: StepRecord | EvalRecord) -> dict[str, Any]:
    return {
        "kind": kind,
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "time": round(time.time(), 3),
    }


def _strict(value: Any) -> Any:
    """``value`` with numbers that JSON does not know as strings."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
