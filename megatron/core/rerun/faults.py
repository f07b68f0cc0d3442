"""Kinds of wrong results, their injection for tests, and the file that records them.

`megatron.core.rerun.state_machine` uses these parts.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megatron.core.config.errors import ConfigError

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
