"""Run the first case of each parametrized test: ``pytest -p tests.support.first_cases``."""

from __future__ import annotations

from collections import Counter

import pytest

_CASES = 1
# Tests of kernels that other tests run too, and that the interpreter needs long for.
_LEFT_OUT = {
    "test_many_heads_of_a_group_take_several_programs",
    "test_without_a_state_and_without_a_skip",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other cases."""
    seen: Counter[str] = Counter()
    first = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        seen[test] += 1
        if seen[test] <= _CASES and test.rpartition("::")[2] not in _LEFT_OUT:
            first.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in first])
    items[:] = first
