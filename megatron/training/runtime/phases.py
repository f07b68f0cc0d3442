"""The current phase of a run in words, which the out-of-memory report prints."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from megatron.training.runtime.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")
Phased = Callable[Concatenate[Runtime, P], R]


def in_phase(words: str) -> Callable[[Phased[P, R]], Phased[P, R]]:
    """Decorate a function of a run: ``run.phase`` is ``words`` while it runs.

    After an exception ``run.phase`` keeps the words, so that the failure report can print them.
    """

    def decorate(function: Phased[P, R]) -> Phased[P, R]:
        @functools.wraps(function)
        def inside(run: Runtime, /, *args: P.args, **kwargs: P.kwargs) -> R:
            before = run.phase
            run.phase = words
            result = function(run, *args, **kwargs)
            run.phase = before
            return result

        return inside

    return decorate
