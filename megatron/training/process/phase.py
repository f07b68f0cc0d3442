"""The current phase of a rank's run in words, which the out-of-memory report prints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.rank_local import each_rank_owns

_phase = "start-up"
each_rank_owns(__name__, "_phase")


def current_phase() -> str:
    """Return the words of the innermost phase; after an exception, of the phase that failed."""
    return _phase


def enter_phase(words: str) -> None:
    """Set the current phase."""
    global _phase
    _phase = words


@contextmanager
def in_phase(words: str) -> Iterator[None]:
    """Decorate a function: the current phase is ``words`` while it runs."""
    before = _phase
    enter_phase(words)
    yield
    enter_phase(before)
