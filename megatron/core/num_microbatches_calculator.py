"""Compute batch sizes of a run, as pure functions of the number of samples consumed so far.

All sizes are in samples.  A ramp-up increases the global batch size in equal increments.  The
functions at the end of this file are Megatron's API: they read one installed calculator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.config.errors import ConfigError, FieldError
from megatron.core.rank_local import each_rank_owns

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchSizeRampup:
    """Ramp-up of the batch size from ``start``, by ``increment``, over ``num_samples`` samples."""

    start: int
    increment: int
    num_samples: int

    @classmethod
    def parse(cls, values: Sequence[str | int]) -> BatchSizeRampup:
        """Parse the values of --rampup-batch-size.  Raises ConfigError unless 3 integers."""
        try:
            start, increment, num_samples = (int(value) for value in values)
        except ValueError:
            shown = " ".join(map(str, values))
            raise ConfigError(
                f"--rampup-batch-size takes three integers (start, increment, samples), "
                f"not {shown!r}"
            ) from None
        return cls(start, increment, num_samples)


@dataclass(frozen=True, kw_only=True)
class NumMicroBatchesCalculator:
    """Number of samples and micro-batches of a step, given the samples consumed before it.

    With ``decrease_batch_size_if_needed`` a step runs the largest batch that divides evenly over
    the data-parallel ranks; the rest of the nominal batch counts as skipped.
    """

    global_batch_size_wanted: int
    micro_batch_size: int
    data_parallel_size: int
    rampup: BatchSizeRampup | None = None
    decrease_batch_size_if_needed: bool = False

    def __post_init__(self) -> None:
        FieldError.raise_for(self._problems())

    @classmethod
    def from_config(cls, options: Any, data_parallel_size: int) -> NumMicroBatchesCalculator:
        """Build the calculator of a run from its flags.

        Raises ConfigError if the sizes are inconsistent.
        """
        micro = options.micro_batch_size
        if micro is None:
            raise ConfigError("--micro-batch-size is missing: give the samples of one forward pass")
        ramp = options.rampup_batch_size
        wanted = options.global_batch_size
        return cls(
            global_batch_size_wanted=micro * data_parallel_size if wanted is None else wanted,
            micro_batch_size=micro,
            data_parallel_size=data_parallel_size,
            rampup=BatchSizeRampup.parse(ramp) if ramp is not None else None,
            decrease_batch_size_if_needed=options.decrease_batch_size_if_needed,
        )

    @property
    def samples_per_microbatch(self) -> int:
        """Number of samples of one micro-batch over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def full_global_batch_size(self) -> int:
        """Global batch size after ramp-up, decreased to a multiple if the run does so."""
        return self._running(self.global_batch_size_wanted)

    def num_microbatches_at_full_size(self) -> int:
        """Return the micro-batches per rank after ramp-up; evaluation uses them from the start."""
        return self.full_global_batch_size // self.samples_per_microbatch

    def nominal_batch_size(self, consumed_samples: int) -> int:
        """Return the global batch size that the flags set after ``consumed_samples``."""
        ramp = self.rampup
        if ramp is None or ramp.num_samples == 0 or consumed_samples > ramp.num_samples:
            return self.global_batch_size_wanted
        increments = (self.global_batch_size_wanted - ramp.start) // ramp.increment
        if increments == 0:
            return ramp.start
        # Megatron-LM divides in floating point: so a run changes its batch size at the same step.
        reached = int(consumed_samples / (ramp.num_samples / increments))
        return ramp.start + reached * ramp.increment

    def global_batch_size(self, consumed_samples: int) -> int:
        """Return the global batch size that runs: the nominal one, or less if it is not divisible.

        Less only with ``decrease_batch_size_if_needed``.
        """
        return self._running(self.nominal_batch_size(consumed_samples))

    def num_microbatches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches per data-parallel rank after ``consumed_samples``."""
        return self.global_batch_size(consumed_samples) // self.samples_per_microbatch

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the next step, if the calculator is installed."""
        return self.num_microbatches(_consumed_samples())

    @property
    def current_global_batch_size(self) -> int:
        """Nominal global batch size of the next step, if the calculator is installed."""
        return self.nominal_batch_size(_consumed_samples())

    def train_iters(self, train_samples: int, consumed_samples: int = 0) -> int:
        """Return the number of complete batches left until ``train_samples``."""
        consumed, iterations = consumed_samples, 0
        for batch in self._ramping_batches(consumed_samples):
            if consumed + batch > train_samples:
                return iterations
            consumed += batch
            iterations += 1
        return iterations + max(0, train_samples - consumed) // self.full_global_batch_size

    def _running(self, batch_size: int) -> int:
        if self.decrease_batch_size_if_needed:
            return batch_size - batch_size % self.samples_per_microbatch
        return batch_size

    def _ramping_batches(self, consumed: int = 0) -> Iterator[int]:
        """Yield the batch sizes of the steps from ``consumed`` samples to the end of ramp-up."""
        if self.rampup is None:
            return
        while consumed <= self.rampup.num_samples:
            batch = self.global_batch_size(consumed)
            yield batch
            consumed += batch

    def _problems(self) -> Iterator[str]:
        """Yield an error message, with a suggested fix, for each inconsistency of the sizes."""
        full, ramp = self.global_batch_size_wanted, self.rampup
        if self.micro_batch_size < 1 or full < 1:
            yield (
                f"--micro-batch-size {self.micro_batch_size} and --global-batch-size {full} "
                f"must both be at least 1"
            )
            return
        yield from self._uneven(f"--global-batch-size {full}", full)
        if ramp is None:
            return
        shown = f"--rampup-batch-size {ramp.start} {ramp.increment} {ramp.num_samples}"
        if ramp.start < 1 or ramp.increment < 1 or ramp.num_samples < 0:
            yield f"{shown}: start and increment must be at least 1, samples at least 0"
        elif full < ramp.start or (full - ramp.start) % ramp.increment:
            yield (
                f"{shown}: from {ramp.start}, steps of {ramp.increment} do not lead to "
                f"--global-batch-size {full}"
            )
        else:
            can_start = ramp.start >= self.samples_per_microbatch
            for size in sorted({*self._ramping_batches()}) if can_start else [ramp.start]:
                yield from self._uneven(f"{shown}: {size}", size)

    def _uneven(self, shown: str, batch_size: int) -> Iterator[str]:
        unit = self.samples_per_microbatch
        product = f"{unit} (--micro-batch-size {self.micro_batch_size} x {self.data_parallel_size}"
        if batch_size < unit:
            yield f"{shown} samples are fewer than {product} replicas), use a larger batch"
        elif batch_size % unit and not self.decrease_batch_size_if_needed:
            yield (
                f"{shown} is not a multiple of {product} replicas), use one or add "
                f"--decrease-batch-size-if-needed"
            )


# -- Megatron's API: functions of the installed calculator ------------------------------------

_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None
_consumed_samples: Callable[[], int] = int  # int() is 0
each_rank_owns(__name__, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", "_consumed_samples")


def init_num_microbatches_calculator(*sizes: Any, **named: Any) -> None:
    """Install a calculator as `reconfigure_num_microbatches_calculator` does.

    Raises RuntimeError if one is installed already.
    """
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        raise RuntimeError("a microbatch calculator exists: use reconfigure or destroy first")
    reconfigure_num_microbatches_calculator(*sizes, **named)


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[str | int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Install a calculator, replacing an existing one; ``rank`` 0 logs the number of microbatches.

    Raises ConfigError if the sizes are inconsistent.
    """
    install_num_microbatches_calculator(
        NumMicroBatchesCalculator(
            global_batch_size_wanted=global_batch_size,
            micro_batch_size=micro_batch_size,
            data_parallel_size=data_parallel_size,
            rampup=BatchSizeRampup.parse(rampup_batch_size) if rampup_batch_size else None,
            decrease_batch_size_if_needed=decrease_batch_size_if_needed,
        )
    )
    if rank == 0:
        logger.info("setting number of microbatches to %d", get_num_microbatches())


def install_num_microbatches_calculator(
    calculator: NumMicroBatchesCalculator, consumed_samples: Callable[[], int] = int
) -> None:
    """Install ``calculator``; the functions below evaluate it at ``consumed_samples()``."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR, _consumed_samples
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = calculator
    _consumed_samples = consumed_samples


def destroy_num_microbatches_calculator() -> None:
    """Uninstall the calculator."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR, _consumed_samples
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    _consumed_samples = int


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Evaluate the functions below at ``consumed_samples`` from now on.

    ``consistency_check`` has no effect: the calculator checks all sizes at construction.
    """
    global _consumed_samples
    before = get_current_global_batch_size()
    _consumed_samples = lambda: consumed_samples  # noqa: E731
    if verbose and get_current_global_batch_size() != before:
        logger.info("ramping up batch size to %d", get_current_global_batch_size())


def _installed() -> NumMicroBatchesCalculator:
    if _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        raise RuntimeError("no microbatch calculator: init_num_microbatches_calculator() first")
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def get_num_microbatches() -> int:
    """Return the number of micro-batches per data-parallel rank in the next step."""
    return _installed().num_microbatches(_consumed_samples())


def get_micro_batch_size() -> int:
    """Return the number of samples of one micro-batch on one rank."""
    return _installed().micro_batch_size


def get_current_global_batch_size() -> int:
    """Return the nominal global batch size of the next step."""
    return _installed().nominal_batch_size(_consumed_samples())


def get_current_running_global_batch_size() -> int:
    """Return the global batch size that the next step runs."""
    return _installed().global_batch_size(_consumed_samples())
