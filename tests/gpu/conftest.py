"""Where the kernels run: on a GPU, or under TRITON_INTERPRET=1 on tensors of the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.fusions import kernels
from megatron.core.optional import why_missing
from tests.gpu import TARGET
from tests.support import triton_interpreter, triton_memory

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_missing("triton")
    if reason is None and not IS_INTERPRETED and not torch.cuda.is_available():
        reason = "needs a GPU, or TRITON_INTERPRET=1"
    for item in items:
        if reason is not None and item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason=reason))


def has_fp8() -> bool:
    """Whether the GPU has fp8 formats; the interpreter has them."""
    if IS_INTERPRETED:
        return int(os.environ.get(TARGET, "90")) >= 89
    return torch.cuda.is_available() and device.multiplies_fp8(torch.device("cuda"))


@pytest.fixture
def where() -> str:
    """The device of the tensors."""
    return "cpu" if IS_INTERPRETED else "cuda"


@pytest.fixture(autouse=True, scope="session")
def interpreter_works() -> None:
    """With today's NumPy."""
    if IS_INTERPRETED:
        triton_interpreter.mend()
        if triton_memory.ASKED in os.environ:
            triton_memory.check_addresses()


@pytest.fixture(autouse=True)
def kernels_used(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of the kernels that a test has met, on the interpreter too; each test meets one."""
    if IS_INTERPRETED:
        monkeypatch.setattr(device, "launches_kernels", lambda where: True)
    else:
        monkeypatch.setattr(device, "_current", torch.device("cuda", 0))
    met: set[str] = set()
    choose = kernels.find

    def find(name: str, *tensors: Tensor | None) -> object:
        module = choose(name, *tensors)
        if module is not None:
            met.add(name)
        return module

    monkeypatch.setattr(kernels, "find", find)
    yield met
    assert met, "no kernel was asked for"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    """Call a function as if there were no kernels."""

    def call(function: Callable[[], object]) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "find", lambda name, *tensors: None)
            return function()

    return call
