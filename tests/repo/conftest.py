"""Tests that parse all files of the project: 1.4 million nodes, some of which are kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """Switch it off: it would search the nodes again and again, and find no cycle."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
