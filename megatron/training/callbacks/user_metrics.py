"""Metrics of user code: functions whose values are logged like the built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.registry import Registry
from megatron.training.runtime.state import StepResult
from megatron.training.step.run import TrainingRun

Metric = Callable[[TrainingRun, StepResult], Mapping[str, Tensor | float]]
_METRICS = Registry[Metric]("the metric", {})


def register_metric(name: str, metric: Metric) -> None:
    """Register ``metric``: its values are logged at every step that is logged.

    ``metric(run, result)`` returns tag -> value.  All ranks call it after the update, so it may use
    collectives; the values of the last rank are logged.
    """
    _METRICS.register(name, metric)


def user_values(
    run: TrainingRun, result: StepResult, taken: Collection[str]
) -> dict[str, Tensor | float]:
    """Return the values of all metrics.

    Raise ConfigError for a tag that is in ``taken`` or that two metrics return.
    """
    values: dict[str, Tensor | float] = {}
    for name, metric in _METRICS.items():
        found = metric(run, result)
        for tag in found:
            if tag in values or tag in taken:
                raise ConfigError(
                    f"the metric {name} returns {tag!r}, which is logged already: use another name"
                )
        values.update(found)
    return values
