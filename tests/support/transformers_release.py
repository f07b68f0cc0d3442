"""Skip comparisons with a release of transformers that computes otherwise than the tested one."""

from __future__ import annotations

import pytest

TESTED = (5, 23)


def need_tested_release(what: str) -> None:
    """Skip the test if transformers is older than the tested release; ``what`` differs in it."""
    transformers = pytest.importorskip("transformers")
    found = transformers.__version__
    if tuple(map(int, found.split(".")[:2])) < TESTED:
        pytest.skip(f"transformers {found}: {what}; the suite is for {'.'.join(map(str, TESTED))}")
