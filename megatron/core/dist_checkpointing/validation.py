"""Whether a checkpoint fits a run: what is absent, what nobody asks for, and what may be let pass.

``--dist-ckpt-strictness`` speaks of *unexpected* keys (the run wants them, the checkpoint lacks
them) and of *missing* ones (the checkpoint has them, the run does not want them).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.core.config.errors import CheckpointError

logger = logging.getLogger(__name__)

# mode -> what is done about keys that the run wants and the checkpoint lacks, and about keys that
# the run does not want.  The first one is the default: every difference stops the run.
STRICTNESS = {
    "assume_ok_unexpected": ("raise", "raise"),
    "raise_all": ("raise", "raise"),
    "raise_unexpected": ("raise", "ignore"),
    "log_unexpected": ("log", "ignore"),
    "log_all": ("log", "log"),
    "return_unexpected": ("return", "ignore"),
    "return_all": ("return", "return"),
    "ignore_all": ("ignore", "ignore"),
}


class StrictHandling(enum.Enum):
    """The modes of `STRICTNESS` under Megatron-LM's names."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"


_SHOWN = 8
# What a run or another format may do without: scales of fp8 are found anew.
AMAX_HISTORY = ".quantizer.amax_history"


@dataclass(frozen=True)
class Differences:
    """Keys that one side lacks, sorted."""

    absent: tuple[str, ...] = ()  # wanted, not in the checkpoint: keep their values
    unused: tuple[str, ...] = ()  # in the checkpoint, not wanted


def compare_keys(
    wanted: Iterable[str], stored: Iterable[str], leave_out: tuple[str, ...] = ()
) -> Differences:
    """What one side has and the other lacks; keys that begin as in ``leave_out`` may be unused."""
    wanted, stored = set(wanted), set(stored)
    unused = sorted(key for key in stored - wanted if not key.startswith(leave_out))
    return Differences(tuple(sorted(wanted - stored)), tuple(unused))


def judge(differences: Differences, strictness: str, folder: object) -> str | None:
    """The sentence that stops the run, or None.  Logs what the mode says to log."""
    on_absent, on_unused = STRICTNESS[strictness]
    sentences = (
        (
            on_absent,
            differences.absent,
            "this run needs {n} tensors that it does not hold: {names}; it was made by another "
            "model (to start them from their initial values: --dist-ckpt-strictness log_all)",
        ),
        (
            on_unused,
            differences.unused,
            "it holds {n} tensors that this run has no place for: {names}; it was made by "
            "another model (to leave them out: --dist-ckpt-strictness raise_unexpected)",
        ),
    )
    problems: list[str] = []
    for action, differing, sentence in sentences:
        keys = [key for key in differing if not key.endswith(AMAX_HISTORY)]
        text = f"{folder}: " + sentence.format(n=len(keys), names=shorten(keys))
        if keys and action == "raise":
            problems.append(text)
        elif keys and action == "log":
            logger.warning(text)
    return "; ".join(problems) or None


def check_strictness(strictness: str) -> None:
    """Raise CheckpointError for a mode that does not exist."""
    if strictness not in STRICTNESS:
        raise CheckpointError(
            f"--dist-ckpt-strictness {strictness} is none of {', '.join(STRICTNESS)}"
        )


def shorten(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
