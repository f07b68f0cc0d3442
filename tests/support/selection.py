"""Which cases of a parametrized test `make test` runs; `make test-slow` runs the others too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def only(default: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all ``cases``, with those outside ``default`` marked as slow."""
    kept = list(default)
    found = list(cases)
    assert all(case in found for case in kept), "a default case does not exist"
    return [case if case in kept else _slow(case) for case in found]


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return all ``cases``, with those after the first ``count`` marked as slow."""
    return [case if i < count else _slow(case) for i, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
