"""The rejected result of a step, and what a rank asks for after each pass of the step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron.core.diagnostics.result_faults import (
    COMPARISON_MATCH,
    COMPARISON_MISMATCH,
    Place,
    RerunState,
)

T = TypeVar("T")
MAX_STARTS = 2  # from the checkpoint of exit code 16, on the device that was under suspicion


class Caller(NamedTuple):
    """A validation in the code, and the rank that runs it."""

    message: str
    rank: int


class Call(NamedTuple):
    """One call of a validation: the ``sequence``-th of ``caller`` in a pass."""

    caller: Caller
    sequence: int


class Request(IntEnum):
    """What a rank asks for at the end of a pass; the largest one of all ranks is done.

    SHARED: the rank only saw a result that every rank sees, so it does not suspect itself.
    """

    GO_ON = 0
    EXPLAINED = 1
    RERUN_SHARED = 2
    RERUN = 3
    STOP_CORRECT = 4
    RERUN_ELSEWHERE = 5
    STOP_PERSISTENT_SHARED = 6
    STOP_PERSISTENT = 7


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """The first rejected result of this rank in a step."""

    call: Call
    result: object
    place: Place
    fatal: bool = True
    is_shared: bool = False  # every rank has this result
    num_starts: int = 0  # from the checkpoint, on the same device

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        (message, rank), sequence = self.call
        return {
            "call": [[message, rank], sequence],
            "result": _to_json(self.result),
            "place": list(self.place),
            "fatal": self.fatal,
            "is_shared": self.is_shared,
            "num_starts": self.num_starts,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Suspect:
        """Return the suspect of `to_json`.  Raises Python's errors for values of other types."""
        (message, rank), sequence = values["call"]
        return cls(
            call=Call(Caller(str(message), int(rank)), int(sequence)),
            result=_from_json(values["result"]),
            place=Place(int(values["place"][0]), *map(str, values["place"][1:3])),
            fatal=bool(values["fatal"]),
            is_shared=bool(values["is_shared"]),
            num_starts=int(values["num_starts"]),
        )


@dataclass
class Findings:
    """What the validations of one pass have found."""

    calls: Counter[str] = field(default_factory=Counter)
    rejected: Suspect | None = None  # the first rejected result; fatal ones count before others
    difference: float | None = None  # of the suspect's result from that of the pass before
    agreed: int | None = None  # largest request of all ranks, if it is known already


def request_after(
    state: RerunState, found: Findings, suspect: Suspect | None, *, here: Place, num_ranks: int
) -> Request:
    """Return what a rank asks for after a pass of the step in ``state``.

    ``suspect``: its first rejected result in the pass before; ``here``: where the rank computes.
    """
    rejected = found.rejected
    if state == RerunState.INITIAL_RUN:
        return _rerun(rejected)
    is_same = found.difference == 0  # None: the validation was not reached
    is_fatal = rejected is not None and rejected.fatal
    if state == RerunState.RERUNNING_IN_PLACE:
        if suspect is not None and is_same:
            return _rerun(suspect)
        if is_fatal:  # another result, but again an unexpected one: it cannot be used
            return _rerun(rejected)
        return Request.GO_ON if suspect is None else Request.EXPLAINED
    if suspect is None or found.difference is None:  # nothing to compare
        return Request.STOP_CORRECT if is_fatal else Request.GO_ON
    if not is_same:
        is_shared = suspect.is_shared and num_ranks > 1
        return Request.STOP_PERSISTENT_SHARED if is_shared else Request.STOP_PERSISTENT
    is_same_place = (suspect.place.node, suspect.place.device) == (here.node, here.device)
    if is_same_place and num_ranks > 1 and suspect.num_starts + 1 < MAX_STARTS:
        return Request.RERUN_ELSEWHERE
    return Request.STOP_CORRECT if suspect.fatal else Request.EXPLAINED


def relative_difference(first: object, second: object) -> float:
    """Return the largest difference relative to the larger value; 0 for equal values and NaNs."""
    a, b = (torch.as_tensor(value, dtype=torch.float64).cpu() for value in (first, second))
    if a.shape != b.shape:
        return COMPARISON_MISMATCH
    is_equal = (a == b) | (a.isnan() & b.isnan())
    relative = (a - b).abs() / torch.maximum(a.abs(), b.abs())
    relative = relative.nan_to_num(nan=math.inf).masked_fill(is_equal, COMPARISON_MATCH)
    return float(relative.max()) if relative.numel() else COMPARISON_MATCH


def _rerun(suspect: Suspect | None) -> Request:
    if suspect is None:
        return Request.GO_ON
    return Request.RERUN_SHARED if suspect.is_shared else Request.RERUN


def is_rejected(rejection_func: Callable[[T], Tensor | bool], result: T) -> bool:
    answer = rejection_func(result)
    return answer if isinstance(answer, bool) else bool(torch.as_tensor(answer).any())


def detached(result: object) -> Any:
    return result.detach().clone() if isinstance(result, Tensor) else result


def shown(result: object) -> object:
    return result.tolist() if isinstance(result, Tensor) else result


def _to_json(result: object) -> Any:
    """Return a number, or a tensor as [dtype, nested list], as JSON; None for another type.

    Numbers are text, since JSON has neither NaN nor infinity.
    """
    if isinstance(result, Tensor):
        values = result.detach().double().reshape(-1).tolist()
        return [list(result.shape), [repr(value) for value in values]]
    return repr(float(result)) if isinstance(result, int | float) else None


def _from_json(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return None if value is None else float(value)
    shape, values = value
    return torch.tensor([float(v) for v in values], dtype=torch.float64).reshape(shape)
