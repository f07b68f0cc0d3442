"""The process of the HTTP front end."""

from __future__ import annotations

import sys

import pytest

from megatron.core import optional
from megatron.core.config.errors import MissingDependency
from tools.lib.front_end_process import FrontEndProcess


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_reported_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """The front end's own process would end with a traceback, after the model is loaded."""
    optional.why_missing.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    try:
        with pytest.raises(MissingDependency, match=f"the server: {package} is not installed"):
            FrontEndProcess("127.0.0.1", 0)
    finally:
        optional.why_missing.cache_clear()
