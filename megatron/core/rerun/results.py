"""Validate results: reject them, compare them with those of an earlier pass, log and track them.

`megatron.core.rerun.state_machine` decides from the findings what runs again.  Here are also the
kinds of wrong results, their injection for tests, and the file that records them.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.config.errors import ConfigError, NonFiniteError

# Scripts search the log of a run for lines of Megatron-LM's logger.
logger = logging.getLogger("megatron.core.rerun_state_machine")

COMPARISON_MATCH = 0.0
COMPARISON_MISMATCH = math.inf
# Fields of a line of the tracker file that `steps_to_skip` reads.
_TRACKED = re.compile(
    r"ts=.+ node=.+ device=.+ jobID=.* rank=(\d+) iteration=(\d+) "
    r"status=(?:RerunValidationStatus\.)?(\w+) result="
)


class RerunMode(str, Enum):
    """What happens to validated results; the flag's name of the last one is ``report_stats``."""

    DISABLED = "disabled"
    VALIDATE_RESULTS = "validate_results"
    REPORT_DETERMINISM_STATS = "report_determinism_stats"


class RerunDiagnostic(str, Enum):
    """Cause of an unexpected result; also the kinds of injected errors."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"
    PERSISTENT_ERROR = "persistent_error"


class RerunState(Enum):
    """State of the rerun state machine."""

    NOT_RUNNING_YET = 0
    INITIAL_RUN = 1
    RERUNNING_IN_PLACE = 2
    WILL_RERUN_FROM_CHECKPOINT = 3
    RERUNNING_FROM_CHECKPOINT = 4
    RERUNNING_AGAIN_FROM_CHECKPOINT = 5


class RerunValidationStatus(str, Enum):
    """Status of an unexpected result in the tracker file."""

    INITIAL_RUN = "initial_run"
    FIRST_RERUN_NOT_REPRODUCIBLE = "first_rerun_not_reproducible"
    FIRST_RERUN_REPRODUCIBLE = "first_rerun_reproducible"
    SECOND_RERUN_NOT_REPRODUCIBLE = "second_rerun_not_reproducible"
    SECOND_RERUN_REPRODUCIBLE = "second_rerun_reproducible"


class Place(NamedTuple):
    """Where a rank computes."""

    rank: int
    node: str
    device: str

    @classmethod
    def here(cls, rank: int) -> Place:
        """Return the place of this process; devices of a node have the numbers of its ranks."""
        return cls(rank, platform.node(), os.environ.get("LOCAL_RANK", "0"))


class RerunErrorInjector:
    """Treats some correct results as unexpected ones, to test the rerun state machine.

    Once in ``error_injection_rate`` validations on average (0: never), until the injected error is
    diagnosed.  The random numbers are its own, so the run's random states do not change.
    """

    _ERROR_NAMES: ClassVar[dict[RerunDiagnostic, str]] = {
        RerunDiagnostic.CORRECT_RESULT: "Expected result",
        RerunDiagnostic.TRANSIENT_ERROR: "Transient error",
        RerunDiagnostic.PERSISTENT_ERROR: "Persistent error",
    }

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic = RerunDiagnostic.TRANSIENT_ERROR,
    ) -> None:
        self.error_injection_rate = error_injection_rate
        self.error_injection_type = RerunDiagnostic(error_injection_type)
        self.injected_error_type: RerunDiagnostic | None = None
        self._random = random.Random(os.environ.get("RANK", "0"))

    def maybe_inject(self) -> bool:
        """Return whether to treat the result that is being validated as unexpected."""
        if not self.error_injection_rate or self.injected_error_type is not None:
            return False
        if self._random.randrange(self.error_injection_rate):
            return False
        self.injected_error_type = self.error_injection_type
        name = self._ERROR_NAMES[self.error_injection_type]
        log(f"Injecting error type {name}")
        return True

    def maybe_miscompare(
        self,
        comparison_func: Callable[[Any, Any], float],
        initial_result: object,
        result: object,
        state: RerunState,
    ) -> float:
        """Return the difference of two results, or that which the injected error would cause."""
        kind = self.injected_error_type
        if kind is None:
            return comparison_func(initial_result, result)
        is_last = state != RerunState.RERUNNING_IN_PLACE
        if is_last or kind == RerunDiagnostic.TRANSIENT_ERROR:
            self.injected_error_type = None
        is_other = kind == (
            RerunDiagnostic.PERSISTENT_ERROR if is_last else RerunDiagnostic.TRANSIENT_ERROR
        )
        return COMPARISON_MISMATCH if is_other else COMPARISON_MATCH

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        injected = self.injected_error_type
        return {
            "error_injection_rate": self.error_injection_rate,
            "error_injection_type": self.error_injection_type.value,
            "injected_error_type": None if injected is None else injected.value,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the error that is being diagnosed; the flags of this run decide the others."""
        injected = state_dict["injected_error_type"]
        self.injected_error_type = None if injected is None else RerunDiagnostic(injected)


class QuickStats:
    """Statistics of values, most of which are zero; keeps the last ``max_size`` others."""

    def __init__(self, max_size: int = 100000) -> None:
        self.max_size = max_size
        self.samples: list[float] = []
        self.num_zeros = self.num_others = 0
        self.max = 0.0

    def record(self, data: float) -> None:
        """Add a value."""
        if data == 0.0:
            self.num_zeros += 1
            return
        if len(self.samples) < self.max_size:
            self.samples.append(data)
        else:
            self.samples[self.num_others % self.max_size] = data
        self.num_others += 1
        self.max = max(self.max, data)

    def combine(self, others: list[QuickStats]) -> None:
        """Add the values of other ranks."""
        for other in others:
            self.num_zeros += other.num_zeros
            self.num_others += other.num_others
            self.samples = (self.samples + other.samples)[-self.max_size :]
            self.max = max(self.max, other.max)

    def reset(self) -> None:
        """Forget all values."""
        vars(self).update(vars(QuickStats(self.max_size)))

    def print_stats(self) -> str:
        """Return the number of values, the share of zeros, and quantiles of the others."""
        total = self.num_zeros + self.num_others
        text = f"{self.num_zeros:,}/{total:,} identical samples"
        if not self.samples:
            return text
        ordered = sorted(self.samples)
        quantiles = ", ".join(
            f"{percent}% {ordered[(len(ordered) - 1) * percent // 100]:.3e}"
            for percent in (1, 50, 95, 99)
        )
        return f"{text}, others: {quantiles}, max {self.max:.3e}"


def log(text: str, *, level: int = logging.WARNING, once: bool = False) -> None:
    """Log ``text`` on this rank; ``once``: every rank logs it, so rank 0 alone does."""
    logger.log(level, "%s", text, extra={"all_ranks": not once})


def steps_to_skip(path: str) -> list[int]:
    """Return the steps whose result the tracker file ``path`` records as wrong for good.

    These are the steps with a result that every rerun reproduced, and, for runs with reruns
    disabled, those that one rank rejected twice.  Raises ConfigError for a line of another form.
    """
    found: Counter[tuple[int, int]] = Counter()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []  # no result was rejected yet
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--result-rejected-tracker-filename {path} cannot be read: {error}; correct the path"
        ) from None
    weights = {"second_rerun_reproducible": 2, "initial_run": 1}
    for number, line in enumerate(lines, start=1):
        match = _TRACKED.match(line)
        if match is None:
            raise ConfigError(
                f"--result-rejected-tracker-filename {path}: line {number} is no record of a "
                "rejected result: remove the line, or name another file"
            )
        rank, iteration, status = match.groups()
        found[int(rank), int(iteration)] += weights.get(status.lower(), 0)
    return sorted({iteration for (_, iteration), weight in found.items() if weight > 1})


T = TypeVar("T")
# Number of values from which `is_unexpectedly_large` takes the maximum, before it rejects any.
_NUM_SAMPLES_BEFORE_JUDGING = 100
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
        found = {**vars(self), "call": [[message, rank], sequence], "place": [*self.place]}
        return {**found, "result": _to_json(self.result)}

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


class ResultValidator:
    """Validations of one rank, and what they have found in the running pass of a step."""

    def __init__(
        self,
        mode: RerunMode,
        error_injector: RerunErrorInjector | None,
        result_rejected_tracker_filename: str | None,
    ) -> None:
        self.mode = mode
        self.state = RerunState.NOT_RUNNING_YET
        self.current_iteration = 0  # of the running step; before it, of the step before
        self.error_injector = error_injector or RerunErrorInjector()
        self.suspect: Suspect | None = None
        self.explanation: str | None = None  # what this rank found in the step, for the user
        self._tracker_file = result_rejected_tracker_filename
        self._has_validated = False  # in a step that may run again
        self._pass = Findings()
        # Of each series of `is_unexpectedly_large`: number of values, and their maximum.
        self._largest: dict[str, tuple[int, float]] = {}
        self._results: dict[Call, Any] = {}  # of the first pass, to report statistics
        self._stats: defaultdict[str, QuickStats] = defaultdict(QuickStats)

    @property
    def is_running(self) -> bool:
        """Whether a pass runs whose results may be rejected without ending the run at once."""
        return self.mode == RerunMode.VALIDATE_RESULTS and self.state not in (
            RerunState.NOT_RUNNING_YET,
            RerunState.WILL_RERUN_FROM_CHECKPOINT,
        )

    def validate_result(
        self,
        result: T,
        rejection_func: Callable[[T], Tensor | bool],
        message: str = "unexpected result",
        comparison_func: Callable[[T, T], float] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
        *,
        is_shared: bool = False,
        where: str = "",
        detail: Callable[[], str] = lambda: "",
    ) -> None:
        """Call ``rejection_func(result)``, and synchronize with the device to read its answer.

        A rejected result makes the step run again.  ``message`` identifies the validation, and
        calls with the same message are numbered; one whose number differs between passes gives
        ``where`` too.  ``comparison_func(first, second)`` returns a difference, by default the
        relative one; above ``tolerance`` the results differ.  A ``fatal`` result is never used for
        training.  ``is_shared``: every rank validates this result.  ``detail()`` is appended to log
        lines.

        Without reruns, that is in mode DISABLED, outside of `should_run_forward_backward`, and in
        an evaluation, a rejected result raises NonFiniteError if ``fatal``, else it is logged.
        """
        name = f"{message}{where}"
        call = Call(Caller(name, my_rank()), self._pass.calls[name])
        self._pass.calls[name] += 1
        compare = comparison_func or relative_difference
        if not self.is_running:
            if self.mode == RerunMode.REPORT_DETERMINISM_STATS:
                if self.state == RerunState.INITIAL_RUN:
                    self._results[call] = detached(result)
                elif call in self._results:
                    self._stats[message].record(compare(self._results[call], result))
            if is_rejected(rejection_func, result):
                self._refuse(result, name + detail(), fatal)
            return
        if not self._has_validated:
            self._has_validated = True
            log("Result validation enabled", once=True)
        is_initial = self.state == RerunState.INITIAL_RUN
        # The first step has no checkpoint of the step before, which a restart needs.
        can_inject = is_initial and self.current_iteration > 1
        is_injected = can_inject and self.error_injector.maybe_inject()
        if is_injected or is_rejected(rejection_func, result):
            suspect = Suspect(
                call=call,
                result=detached(result),
                place=Place.here(call.caller.rank),
                fatal=fatal,
                is_shared=is_shared,
            )
            self._reject(suspect, f"{name}{detail()}")
        if self.suspect is not None and self.suspect.call == call and not is_initial:
            self._compare(self.suspect, result, compare, tolerance)

    def is_unexpectedly_large(
        self,
        result: Tensor | float,
        threshold: float,
        context: str,
        num_samples: int = _NUM_SAMPLES_BEFORE_JUDGING,
        resample: bool = False,
    ) -> bool:
        """Return whether ``result`` is at least ``threshold`` times the maximum so far.

        The maximum is over the first ``num_samples`` values of the series ``context``, for which
        the result is False.  ``resample`` restarts the series.
        """
        value = float(result)
        if resample:
            self._largest.pop(context, None)
        count, largest = self._largest.get(context, (0, value))
        if count < num_samples:
            self._largest[context] = count + 1, max(value, largest)
            return False
        return value >= threshold * largest

    def _refuse(self, result: object, message: str, fatal: bool) -> None:
        self._track(RerunValidationStatus.INITIAL_RUN, result, message)
        text = f"rank {my_rank()}: {message}: {shown(result)}"
        if fatal:
            raise NonFiniteError(text)
        log(text)

    def _reject(self, suspect: Suspect, text: str) -> None:
        """Note a rejected result; log the first one of the first pass."""
        known = self._pass.rejected
        value = shown(suspect.result)
        if known is None or (suspect.fatal and not known.fatal):
            self._pass.rejected = suspect
            self.explanation = f"{text}: {value}"
        if known is None and self.state == RerunState.INITIAL_RUN:
            log(
                f"Unexpected result {value} on rank {suspect.place.rank} at iteration "
                f"#{self.current_iteration} invocation #{suspect.call.sequence} "
                f"(message='{text}')",
                level=logging.ERROR,
            )

    def _compare(
        self, suspect: Suspect, result: T, compare: Callable[[T, T], float], tolerance: float
    ) -> None:
        """Compare ``result`` with that of ``suspect``, log the diagnosis and track it."""
        is_first = self.state == RerunState.RERUNNING_IN_PLACE
        before: Any = suspect.result
        if before is None:  # of a type that the checkpoint could not hold
            before = result if self._pass.rejected is not None else math.nan
        difference = self.error_injector.maybe_miscompare(compare, before, result, self.state)
        is_same = difference <= tolerance
        self._pass.difference = 0.0 if is_same else difference
        status = RerunValidationStatus(
            f"{'first' if is_first else 'second'}_rerun_{'' if is_same else 'not_'}reproducible"
        )
        verb, sign = ("is", "=") if is_same else ("is not", "!=")
        log(
            f"{'First' if is_first else 'Second'} rerun: unexpected result {verb} reproducible "
            f"within the tolerance ({shown(result)} {sign} {shown(before)})"
        )
        self._track(status, result, suspect.call.caller.message)
        self.explanation = self.explanation or f"{suspect.call.caller.message}: {shown(before)}"
        if is_first and is_same:
            return  # no diagnosis before the next start
        diagnosis = "Correct result (but possible Application error)"
        if not is_same:
            diagnosis = f"Possible {'transient' if is_first else 'persistent'} error!"
        rank, node, where = suspect.place
        log(f"Rank {rank}, node {node}, device {where}: {diagnosis}!", level=logging.ERROR)

    def report_stats(self) -> None:
        """Log the statistics of determinism of this rank."""
        for message, stats in sorted(self._stats.items()):
            log(
                f"Stats on computation determinism of '{message}' on rank {my_rank()} in "
                f"{self.current_iteration} iterations: {stats.print_stats()}"
            )

    def _track(self, status: RerunValidationStatus, result: object, message: str) -> None:
        """Append a line to the tracker file in one write: other ranks append to it too."""
        if self._tracker_file is None:
            return
        rank, node, where = Place.here(my_rank())
        line = (
            f"ts={datetime.now()} node={node} device={where} "
            f"jobID={os.environ.get('SLURM_JOBID', '')} rank={rank} "
            f"iteration={self.current_iteration} status={status.value} result={shown(result)} "
            f"message='{message}'"
        )
        with open(self._tracker_file, "a", encoding="utf-8") as file:
            file.write(" ".join(line.splitlines()) + "\n")


def my_rank() -> int:
    """Return the global rank; 0 without process groups."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Return the number of ranks; 1 without process groups."""
    return dist.get_world_size() if dist.is_initialized() else 1


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
