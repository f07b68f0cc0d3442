"""Reads training and validation lines, ours and Megatron-LM's, back into numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

_TRAINING = re.compile(
    r"^\s*(?:\[(?P<time>[\d\-]+ [\d:.]+)\]\s*)?"
    r"iteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+)\s*\|"
)
_VALIDATION = re.compile(
    r"^\s*validation(?P<suffix>-\d+)? loss at iteration (?P<iteration>\d+)"
    r"(?: on (?P<split>validation|test) set)?\s*\|"
)
_FIELD = re.compile(r"^\s*(?P<label>.+?):\s+(?P<value>\S+)(?: %)?\s*$")


@dataclass(frozen=True, kw_only=True)
class TrainingLine:
    """One line per interval.  ``values`` has the labels of the line, losses among them."""

    iteration: int
    train_iters: int
    time: str | None  # as printed; None where the stamp was cut off
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ValidationLine:
    """One evaluation.  Keys are those of the losses."""

    iteration: int
    split: Literal["validation", "test"]
    suffix: str
    is_final: bool
    losses: dict[str, float]
    perplexities: dict[str, float]


def parse_log(lines: Iterable[str]) -> Iterator[TrainingLine | ValidationLine]:
    """The training and validation lines among ``lines``, in their order; others are skipped.

    A launcher's prefix before a line (``[rank3]:``) is allowed.
    """
    for line in lines:
        text = re.sub(r"^\s*\[?(?:default|rank)?\d+\]?:", "", line)
        if parsed := parse_training_line(text) or parse_validation_line(text):
            yield parsed


def parse_training_line(line: str) -> TrainingLine | None:
    """None if ``line`` is something else."""
    head = _TRAINING.match(line)
    if head is None:
        return None
    return TrainingLine(
        iteration=int(head["iteration"]),
        train_iters=int(head["total"]),
        time=head["time"],
        values=dict(_fields(line[head.end() :])),
    )


def parse_validation_line(line: str) -> ValidationLine | None:
    """None if ``line`` is something else."""
    head = _VALIDATION.match(line)
    if head is None:
        return None
    fields = dict(_fields(line[head.end() :]))
    return ValidationLine(
        iteration=int(head["iteration"]),
        split="test" if head["split"] == "test" else "validation",
        suffix=head["suffix"] or "",
        is_final=head["split"] is not None,
        losses=_ending_with(fields, " value"),
        perplexities=_ending_with(fields, " PPL"),
    )


def _ending_with(fields: dict[str, float], ending: str) -> dict[str, float]:
    return {k.removesuffix(ending): v for k, v in fields.items() if k.endswith(ending)}


def _fields(text: str) -> Iterator[tuple[str, float]]:
    for part in text.split("|"):
        if field := _FIELD.match(part):
            yield field["label"], float(field["value"])
