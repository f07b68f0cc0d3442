"""Batch sizes over a run, as pure functions of the samples consumed so far.

All sizes are in samples.  A ramp-up grows the global batch in equal increments; the functions at
the end are Megatron's names over one installed calculator, for scripts that use them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.config.errors import ConfigError
from megatron.core.rank_local import each_rank_owns

logger = logging.getLogger(__name__)


class BatchOptions(Protocol):
    """The batch flags of a run."""

    @property
    def micro_batch_size(self) -> int | None: ...
    @property
    def global_batch_size(self) -> int | None: ...
    @property
    def rampup_batch_size(self) -> Sequence[str | int] | None: ...
    @property
    def decrease_batch_size_if_needed(self) -> bool: ...


@dataclass(frozen=True)
class BatchSizeRampup:
    """From ``start``, by ``increment``, over ``num_samples`` up to the full batch size."""

    start: int
    increment: int
    num_samples: int

    @classmethod
    def parse(cls, values: Sequence[str | int]) -> BatchSizeRampup:
        """The three numbers of --rampup-batch-size.  Raises ConfigError when they are not."""
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
    """How many samples and micro-batches a step takes, given the samples consumed before it.

    With ``decrease_batch_size_if_needed`` a step runs the largest batch that divides evenly over
    the replicas; the rest of the nominal batch counts as skipped.
    """

    global_batch_size_wanted: int
    micro_batch_size: int
    data_parallel_size: int
    rampup: BatchSizeRampup | None = None
    decrease_batch_size_if_needed: bool = False

    def __post_init__(self) -> None:
        ConfigError.raise_for(self._problems())

    @classmethod
    def from_config(
        cls, options: BatchOptions, data_parallel_size: int
    ) -> NumMicroBatchesCalculator:
        """The calculator of a run.  Raises ConfigError when the sizes do not fit together."""
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
        """Samples of one micro-batch over all replicas."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def full_global_batch_size(self) -> int:
        """The batch after ramp-up, as it runs."""
        return self._running(self.global_batch_size_wanted)

    def num_microbatches_at_full_size(self) -> int:
        """Micro-batches of a replica after ramp-up; evaluation uses them from the start."""
        return self.full_global_batch_size // self.samples_per_microbatch

    def nominal_batch_size(self, consumed_samples: int) -> int:
        """The batch that was asked for at this point of the run."""
        ramp = self.rampup
        if ramp is None or ramp.num_samples == 0 or consumed_samples > ramp.num_samples:
            return self.global_batch_size_wanted
        increments = (self.global_batch_size_wanted - ramp.start) // ramp.increment
        if increments == 0:
            return ramp.start
        # In floating point as in the reference: the same run changes size at the same step.
        reached = int(consumed_samples / (ramp.num_samples / increments))
        return ramp.start + reached * ramp.increment

    def global_batch_size(self, consumed_samples: int) -> int:
        """The batch that is run: the nominal one, or less where that does not divide evenly."""
        return self._running(self.nominal_batch_size(consumed_samples))

    def num_microbatches(self, consumed_samples: int) -> int:
        """Micro-batches of one replica in the step after ``consumed_samples``."""
        return self.global_batch_size(consumed_samples) // self.samples_per_microbatch

    def train_iters(self, train_samples: int, consumed_samples: int = 0) -> int:
        """Whole batches left of ``train_samples``; a last partial batch is dropped."""
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
        """Batch sizes of the steps after ``consumed`` samples until the ramp is over."""
        if self.rampup is None:
            return
        while consumed <= self.rampup.num_samples:
            batch = self.global_batch_size(consumed)
            yield batch
            consumed += batch

    def _problems(self) -> Iterator[str]:
        """What keeps these sizes from making a run, with the cure."""
        full, ramp = self.global_batch_size_wanted, self.rampup
        if self.micro_batch_size < 1 or full < 1:
            yield (
                f"--micro-batch-size {self.micro_batch_size} and --global-batch-size {full} "
                f"must both be at least 1"
            )
            return
        yield from self._uneven("--global-batch-size", full)
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
                yield from self._uneven(shown, size)

    def _uneven(self, flag: str, batch_size: int) -> Iterator[str]:
        unit = self.samples_per_microbatch
        shown = f"{flag} {batch_size}" if flag == "--global-batch-size" else f"{flag}: {batch_size}"
        product = f"{unit} (--micro-batch-size {self.micro_batch_size} x {self.data_parallel_size}"
        if batch_size < unit:
            yield f"{shown} samples are fewer than {product} replicas), use a larger batch"
        elif batch_size % unit and not self.decrease_batch_size_if_needed:
            yield (
                f"{shown} is not a multiple of {product} replicas), use one or add "
                f"--decrease-batch-size-if-needed"
            )


# -- Megatron's names over one installed calculator -------------------------------------------

_calculator: NumMicroBatchesCalculator | None = None
_consumed_samples: Callable[[], int] = int  # int() is 0
each_rank_owns(__name__, "_calculator", "_consumed_samples")


def init_num_microbatches_calculator(*sizes: Any, **named: Any) -> None:
    """`reconfigure_num_microbatches_calculator`, for the first time."""
    if _calculator is not None:
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
    """Install a calculator, also where one exists; ``rank`` 0 logs the constant batch."""
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
    """Make ``calculator`` what the functions below answer from, at ``consumed_samples()``."""
    global _calculator, _consumed_samples
    _calculator, _consumed_samples = calculator, consumed_samples


def destroy_num_microbatches_calculator() -> None:
    """Forget the installed calculator."""
    global _calculator, _consumed_samples
    _calculator, _consumed_samples = None, int


unset_num_microbatches_calculator = destroy_num_microbatches_calculator


def update_num_microbatches(
    consumed_samples: int, consistency_check: bool = True, verbose: bool = False
) -> None:
    """Move to the step after ``consumed_samples``.

    Sizes were checked when the calculator was made, so ``consistency_check`` changes nothing.
    """
    global _consumed_samples
    before = get_current_global_batch_size()
    _consumed_samples = lambda: consumed_samples  # noqa: E731
    if verbose and get_current_global_batch_size() != before:
        logger.info("ramping up batch size to %d", get_current_global_batch_size())


def _installed() -> NumMicroBatchesCalculator:
    if _calculator is None:
        raise RuntimeError("no microbatch calculator: init_num_microbatches_calculator() first")
    return _calculator


def get_num_microbatches() -> int:
    """Micro-batches of one replica in the coming step."""
    return _installed().num_microbatches(_consumed_samples())


def get_micro_batch_size() -> int:
    """Samples of one micro-batch."""
    return _installed().micro_batch_size


def get_current_global_batch_size() -> int:
    """The batch asked for in the coming step."""
    return _installed().nominal_batch_size(_consumed_samples())


def get_current_running_global_batch_size() -> int:
    """The batch run in the coming step."""
    return _installed().global_batch_size(_consumed_samples())
