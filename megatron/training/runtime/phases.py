"""What a run is doing, in words: the report of a failed allocation says it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from megatron.training.runtime.runtime import Runtime

P = ParamSpec("P")
R = TypeVar("R")
Phased = Callable[Concatenate[Runtime, P], R]


def in_phase(words: str) -> Callable[[Phased[P, R]], Phased[P, R]]:
    """Decorate a function of a run: ``run.phase`` is ``words`` until it returns.

    After an exception ``run.phase`` remains, so that whoever reports the failure can read it.
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
