"""Kernels in C++ on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron.core.device import cpu_kernels


@contextmanager
def kernels_off() -> Iterator[None]:
    """Public functions take the way of torch's operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "take", lambda *_: False)
        yield


@pytest.fixture(params=["compiled", "torch"])
def each_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the kernels of C++, where they are installed, and without."""
    if request.param == "torch":
        with kernels_off():
            yield
        return
    if cpu_kernels.compiled() is None:
        pytest.skip("the kernels are not installed: python setup.py build_ext --inplace")
    yield
