"""Callbacks (--callback MODULE:CLASS) and metrics of user code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.registry import Registry
from megatron.training.process.user_code import find_user_object
from megatron.training.runtime.context import StepResult
from megatron.training.step.run import Callback, TrainingRun

_FLAG = "--callback"


def callback_problems(paths: Iterable[str]) -> list[str]:
    """Return an error message for each of ``paths`` that is not a usable callback class."""
    problems = []
    for path in paths:
        try:
            _callback_class(path)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def user_callbacks(paths: Iterable[str]) -> list[Callback]:
    """Create one callback for each of ``paths``.  Raise ConfigError for an unusable one."""
    return [_callback_class(path)() for path in paths]


def require_callbacks(values: Iterable[object]) -> None:
    """Raise ConfigError unless all values of ``pretrain(callbacks=...)`` are callbacks."""
    ConfigError.raise_for(
        [
            f"pretrain(callbacks=[...]) holds {value!r}, which is no instance of a subclass of "
            "Callback: pass objects such as MyCallback()"
            for value in values
            if not isinstance(value, Callback)
        ]
    )


def _callback_class(path: str) -> type[Callback]:
    found = find_user_object(path, _FLAG)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ConfigError(
            f"{_FLAG} {path}: it is not a subclass of megatron.training.callbacks.Callback; derive "
            "it from that class"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(
            f"{_FLAG} {path}: its constructor cannot be called without arguments ({error}); give "
            "them defaults, or pass an instance to pretrain(callbacks=[...])"
        ) from None
    return found


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
