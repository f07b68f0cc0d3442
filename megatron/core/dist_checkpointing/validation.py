"""Compare the keys of a checkpoint with those of a run, and handle the differences.

``--dist-ckpt-strictness`` uses Megatron-LM's terms: *unexpected* keys are requested by the run but
not in the checkpoint; *missing* keys are in the checkpoint but not requested.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.parallel.collectives import raise_if

logger = logging.getLogger(__name__)


class StrictHandling(enum.Enum):
    """Handling of differing keys (raise, log, return or ignore), with Megatron-LM's names.

    Modes with ``all`` cover missing keys too, the others ignore them.  Default: ``raise_all``.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    RAISE_ALL = "raise_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether the keys of the checkpoint are compared before anything is loaded."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether the keys that all ranks request are needed."""
        return val.value.endswith("_all")

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether `load` returns the differing keys."""
        return val.value.startswith("return_")


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the mode with this name.  Raises ValueError for another name."""
    try:
        return StrictHandling(strict)
    except ValueError as error:
        raise ValueError(f"Invalid strict flag: {error}") from error


_SHOWN = 8
INSIDE_QUANTIZER = ".quantizer."  # in the name of each buffer of a layer's quantizer
_EXTRA_STATE = "_extra_state/"  # Megatron Core's empty objects, which modules here do not have
# Scales of quantized weights and inputs.
SCALES = tuple(
    f"{INSIDE_QUANTIZER}{name}" for name in ("weight_scale", "weight_scale_2", "input_scale")
)
NEEDS_SCALES = (
    "a quantized model needs the scales of a calibrated checkpoint: calibrate one first (python "
    "examples/post_training/modelopt/quantize.py --export-quant-cfg NAME --load DIR --save DIR ...)"
)
# State that may be absent: fp8 scales are computed again from new amax values.
AMAX_HISTORY = f"{INSIDE_QUANTIZER}amax_history"


@dataclass(frozen=True)
class Differences:
    """Keys that only the run or only the checkpoint has, sorted."""

    absent: tuple[str, ...] = ()  # requested, not in the checkpoint; these keep their values
    unused: tuple[str, ...] = ()  # in the checkpoint, not requested


_PRECISION_FLAGS = {
    "bfloat16": "--bf16",
    "float16": "--fp16",
    "float32": "neither --bf16 nor --fp16",
}


def permitted_differences(
    folder: Path,
    plans: Sequence[JsonObject],
    stored: Collection[str],
    strictness: str,
    leave_out: tuple[str, ...],
) -> tuple[list[str], list[str]]:
    """On rank 0: return the differences that ``strictness`` permits.  Raises CheckpointError.

    ``plans``: of each rank the keys that it wants and its problems, or its error.
    """
    for plan in plans:
        raise_if(plan.get("error"))
    problems = sorted({problem for plan in plans for problem in plan["problems"]})
    if problems:
        text = f"{folder} does not fit this run: {shorten(problems)}"
        if found := re.search(r"has dtype (\w+) in the checkpoint", "\n".join(problems)):
            flag = _PRECISION_FLAGS.get(found[1], f"another precision ({found[1]})")
            text += (
                f"; the checkpoint was saved with {flag}: give this run the same precision; "
                "--no-load-optim --load-main-params-from-ckpt converts the weights"
            )
        raise CheckpointError(text)
    requested = {key for plan in plans for key in plan["wanted"]}
    absent = sorted(requested.difference(stored))
    left_out = {key for key in stored if key.startswith(leave_out) or _EXTRA_STATE in key}
    unused = sorted(set(stored) - requested - left_out)
    _forbid(absent, unused, strictness, folder)
    return absent, unused


def _forbid(absent: list[str], unused: list[str], strictness: str, folder: Path) -> None:
    """Raise CheckpointError for differences that ``strictness`` forbids; log those that it logs."""
    default = strictness == StrictHandling.ASSUME_OK_UNEXPECTED.value
    on_absent, scope = ("raise", "all") if default else strictness.split("_")
    problems = []
    if scales := [key for key in absent if key.endswith(SCALES)]:
        problems.append(
            f"{folder} holds no {shorten(scales)}: {NEEDS_SCALES}, or give the values of "
            "--export-quant-cfg and --kitchen-config-file with which it was calibrated"
        )
    elif scales := [key for key in unused if key.endswith(SCALES)]:
        problems.append(
            f"{folder} is a quantized checkpoint, and this run does not use its scales "
            f"{shorten(scales)}: give the --export-quant-cfg with which it was calibrated, or "
            "--use-checkpoint-args"
        )
    for action, differing, sentence in (
        (
            on_absent,
            absent,
            "this run needs {n} tensors that it does not hold: {names}; it was made by another "
            "model (to start them from their initial values: --dist-ckpt-strictness log_all)",
        ),
        (
            on_absent if scope == "all" else "ignore",
            unused,
            "it holds {n} tensors that this run does not have: {names}; it was made by "
            "another model (to leave them out: --dist-ckpt-strictness raise_unexpected)",
        ),
    ):
        keys = [key for key in differing if not key.endswith((AMAX_HISTORY, *SCALES))]
        text = f"{folder}: " + sentence.format(n=len(keys), names=shorten(keys))
        if keys and action == "raise":
            problems.append(text)
        elif keys and action == "log":
            logger.warning(text)
    if problems:
        raise CheckpointError("; ".join(problems))


def check_strictness(strictness: str) -> None:
    """Raise CheckpointError for an unknown mode."""
    modes = [mode.value for mode in StrictHandling]
    if strictness not in modes:
        raise CheckpointError(f"--dist-ckpt-strictness {strictness} is none of {', '.join(modes)}")


def shorten(names: Sequence[str]) -> str:
    """Join the first names, and append the number of the others."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
