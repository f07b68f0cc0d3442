"""Read the values of a run over its steps: from metrics files, TensorBoard folders and logs.

Values have the tags of TensorBoard, whatever they are read from.  If a step is there twice, as
after a restart, the later value counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.core.optional import require

Curve = dict[int, float]  # step -> value
Curves = dict[str, Curve]  # tag -> curve

METRICS_FILE = "metrics.jsonl"  # looked for in a folder
TOKENS = "tokens/s"
SAMPLES = "samples/s"
_EVENTS = "events.out.tfevents.*"
_TRAINING = re.compile(r"\biteration\s+(\d+)/\s*\d+\s*\|(.*)")
_VALIDATION = re.compile(
    r"\bvalidation(-\d+)? loss at iteration (\d+)(?: on (validation|test) set)?\s*\|(.*)"
)
_FIELD = re.compile(r"\s*(.+?):\s+([-+\d.eE]+|[+-]?nan|[+-]?inf)(?: %)?\s*$", re.IGNORECASE)
_TAGS = {  # label of the console -> tag
    "learning rate": "learning-rate",
    "grad norm": "grad-norm",
    "params norm": "params-norm",
    "loss scale": "loss-scale",
    "global batch size": "batch-size",
}
_NOT_CURVES = {"kind", "time", "final", "consumed_samples", "consumed samples"}
_ELAPSED = "elapsed time per iteration (ms)"


class NoValues(Exception):
    """A path without values of a run; the message says why."""


def read_run(path: Path) -> Curves:
    """Return the values of a run.  Raise NoValues."""
    if path.is_dir() and (path / METRICS_FILE).is_file():
        path /= METRICS_FILE
    if path.is_dir():
        if not any(path.rglob(_EVENTS)):
            raise NoValues(f"{path} has neither {METRICS_FILE} nor TensorBoard's event files")
        entries = _of_events(path)
    elif path.is_file():
        with path.open(errors="replace") as file:
            is_json = file.readline().startswith("{")
            file.seek(0)
            curves = _collect((_of_json if is_json else _of_log)(file))
        if not curves:
            raise NoValues(f"{path} has no line of a training step")
        return curves
    else:
        raise NoValues(f"{path} does not exist")
    return _collect(entries)


def _collect(entries: Iterable[tuple[int, str, float]]) -> Curves:
    curves: Curves = {}
    for step, tag, value in entries:
        curves.setdefault(tag, {})[step] = value
    seconds = {s: ms / 1000 for s, ms in curves.pop(_ELAPSED, {}).items()}
    seconds = seconds or curves.get("iteration-time", {})
    batches = curves.get("batch-size", {})
    rates = {s: batches[s] / t for s, t in seconds.items() if s in batches and t > 0}
    if rates:
        curves[SAMPLES] = rates
    return {tag: dict(sorted(curve.items())) for tag, curve in curves.items()}


def _of_json(lines: Iterable[str]) -> Iterator[tuple[int, str, float]]:
    for line in lines:
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed
        step = values.pop("iteration", None)
        interval = values.pop("interval", {})
        for tag, value in {**values, _ELAPSED: interval.get(_ELAPSED)}.items():
            if tag not in _NOT_CURVES and value is not None:
                yield step, tag, float(value)  # "NaN" too


def _of_events(folder: Path) -> Iterator[tuple[int, str, float]]:
    reader = require("tensorboard.backend.event_processing.event_accumulator", str(folder))
    for place in sorted({path.parent for path in folder.rglob(_EVENTS)}):
        events = reader.EventAccumulator(str(place), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if not tag.endswith(" vs samples"):
                yield from ((event.step, tag, event.value) for event in events.Scalars(tag))


def _of_log(lines: Iterable[str]) -> Iterator[tuple[int, str, float]]:
    for line in lines:
        if found := _TRAINING.search(line):
            for label, value in _fields(found[2]):
                yield int(found[1]), _TAGS.get(label, label), value
        elif found := _VALIDATION.search(line):
            suffix, step, split, text = found.groups()
            for label, value in _fields(text):
                key = label.removesuffix(" value").removesuffix(" PPL")
                tag = f"{key} {split or 'validation'}{suffix or ''}"
                yield int(step), tag + (" ppl" if label.endswith("PPL") else ""), value


def _fields(text: str) -> Iterator[tuple[str, float]]:
    for part in text.split("|"):
        found = _FIELD.match(part)
        if found and found[1] not in _NOT_CURVES:
            yield found[1], float(found[2])
