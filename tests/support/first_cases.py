"""Run the first case of each parametrized test: ``pytest -p tests.support.first_cases``."""

from __future__ import annotations

from collections import Counter

import pytest

_CASES = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other cases."""
    seen: Counter[str] = Counter()
    first = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] <= _CASES:
            first.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in first])
    items[:] = first
