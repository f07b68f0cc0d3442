"""Records of steps and evaluations, which are built once and passed to every sink.

Console, TensorBoard, W&B and the metrics file read each value from the same field.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.diagnostics.log_once import warn_switched_off
from megatron.training.step.run import SINK_ERRORS

_LIKELIHOOD = "lm loss"  # mean negative log-likelihood of a token


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one step.

    ``losses`` and ``values`` are filled at --tensorboard-log-interval.  ``interval`` is filled at
    --log-interval and covers the steps since the last line.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    losses: Mapping[str, float]  # loss key -> value of this step
    values: Mapping[str, float]  # TensorBoard tag -> value, without the losses
    interval: Mapping[str, float] | None  # console label -> value, in the order of the line


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """Result of one evaluation of one dataset."""

    iteration: int
    consumed_samples: int
    losses: Mapping[str, float]
    split: Literal["validation", "test"]
    suffix: str  # "" or, with several validation sets, "-0", "-1", ...
    is_final: bool

    @property
    def perplexities(self) -> dict[str, float]:
        """exp of the language-model loss, which is limited to 20; NaN if the loss is NaN.

        Other values (rewards, accuracies, losses of pairs) are no likelihoods of tokens.
        """
        losses = {key: loss for key, loss in self.losses.items() if key == _LIKELIHOOD}
        return {key: math.exp(min(loss, 20.0)) for key, loss in losses.items()}

    @property
    def tagged(self) -> dict[str, float]:
        """TensorBoard tag -> value of all losses and perplexities."""
        values = {}
        perplexities = self.perplexities
        for key, loss in self.losses.items():
            tag = f"{key} {self.split}{self.suffix}"
            values[tag] = loss
            if key in perplexities:
                values[f"{tag} ppl"] = perplexities[key]
        return values


class Sink(ABC):
    """A destination of records; its methods raise one of SINK_ERRORS when it cannot write.

    ``name`` identifies its writer for scripts, ``log_name`` is its name in warnings.
    """

    name: str
    log_name: str
    takes_repeated_evals = False  # whether it writes an evaluation again at the end of the run

    @abstractmethod
    def write_step(self, record: StepRecord) -> None:
        """Write the values of a step that this sink logs."""

    @abstractmethod
    def write_eval(self, record: EvalRecord) -> None:
        """Write an evaluation."""

    def close(self) -> None:
        """Write buffered records and release resources."""
        return

    @property
    def writer(self) -> Any:
        """The object that scripts may write to directly, or None."""
        return None


def open_sink(sinks: list[Sink], log_name: str, make: Callable[[], Sink]) -> None:
    """Append the sink that ``make`` returns; if that fails, warn instead."""
    try:
        sink = make()
    except SINK_ERRORS as error:
        warn_switched_off(log_name, error)
        return
    sink.log_name = log_name
    sinks.append(sink)
