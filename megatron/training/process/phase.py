"""The current phase of a rank's run in words, which the out-of-memory report prints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from megatron.core.rank_local import each_rank_owns

P = ParamSpec("P")
R = TypeVar("R")

_phase = "start-up"
each_rank_owns(__name__, "_phase")


def current_phase() -> str:
    """Return the words of the innermost phase; after an exception, of the phase that failed."""
    return _phase


def enter_phase(words: str) -> None:
    """Set the current phase."""
    global _phase
    _phase = words


def in_phase(words: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: the current phase is ``words`` while it runs."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            before = _phase
            enter_phase(words)
            result = function(*args, **kwargs)
            enter_phase(before)
            return result

        return inside

    return decorate
