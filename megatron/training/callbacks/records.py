"""What is logged: one record per step or evaluation, made once and handed to every sink.

A number stands in a record once; console, TensorBoard, W&B and the metrics file all read it there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.training.runtime.sink_failure import SINK_ERRORS, call_each, warn_switched_off


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step.

    ``losses`` and ``values`` are what is due under --tensorboard-log-interval, ``interval`` what
    is due under --log-interval and covers the steps since the last line.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    losses: Mapping[str, float]  # loss key -> value of this step
    values: Mapping[str, float]  # TensorBoard tag -> value, without the losses
    interval: Mapping[str, float] | None  # console label -> value, in the order of the line


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation of one data set."""

    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    split: Literal["validation", "test"]
    suffix: str  # "" or, with several validation sets, "-0", "-1", ...
    is_final: bool
    is_repeated: bool = False  # the same evaluation was logged at this iteration before

    @property
    def perplexities(self) -> dict[str, float]:
        """exp of each loss, which is cut at 20; NaN where the loss is."""
        return {key: math.exp(min(loss, 20.0)) for key, loss in self.losses.items()}


class Sink(ABC):
    """A place that records go to; raises one of SINK_ERRORS when the place fails.

    ``name`` is how scripts ask for its writer, ``log_name`` what a warning calls it.
    """

    name: str
    log_name: str
    takes_repeated_evals = False  # of an EvalRecord with ``is_repeated``

    @abstractmethod
    def write_step(self, record: StepRecord) -> None:
        """Take what it wants of a step."""

    @abstractmethod
    def write_eval(self, record: EvalRecord) -> None:
        """Take an evaluation."""

    def close(self) -> None:
        """Write what is still held back."""
        return

    @property
    def writer(self) -> Any:
        """What a script may write to itself, None if there is no such thing."""
        return None


class SinkList:
    """Sinks that cannot end training: one that fails is named in a warning and switched off."""

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def open(self, log_name: str, make: Callable[[], Sink]) -> None:
        """Add the sink that ``make`` opens."""
        try:
            sink = make()
        except SINK_ERRORS as error:
            warn_switched_off(log_name, error)
            return
        sink.log_name = log_name
        self._sinks.append(sink)

    def write_step(self, record: StepRecord) -> None:
        """Hand a step to every sink."""
        call_each(self._sinks, lambda sink: sink.write_step(record))

    def write_eval(self, record: EvalRecord) -> None:
        """Hand an evaluation to every sink that does not have it yet."""

        def write(sink: Sink) -> None:
            if sink.takes_repeated_evals or not record.is_repeated:
                sink.write_eval(record)

        call_each(self._sinks, write)

    def close(self) -> None:
        """Close and forget all sinks."""
        call_each(self._sinks, lambda sink: sink.close())
        self._sinks.clear()

    def writers(self) -> dict[str, Any]:
        """Name to writer, of the sinks that have one."""
        return {sink.name: sink.writer for sink in self._sinks if sink.writer is not None}
