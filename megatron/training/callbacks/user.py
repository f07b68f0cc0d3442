"""Import callbacks of user code (--callback MODULE:CLASS)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from megatron.core.config.errors import ConfigError
from megatron.training.process.user_code import find_user_object
from megatron.training.step.run import Callback

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
