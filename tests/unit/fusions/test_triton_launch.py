"""`fusions.triton.launch` keeps compiled kernels; their results are tested in tests/gpu."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.host_gpu.host_time import Driver

triton: Any = pytest.importorskip("triton")
launching: Any = importlib.import_module("megatron.core.fusions.triton.launch")


class _Kernel:
    """What `launch` asks of a kernel of Triton; it writes down what was compiled and what ran."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*args: Any, num_warps: int) -> Any:
            self.compiled.append((grid, num_warps, *args))
            return _Compiled(self)

        return compile_and_run


class _Compiled:
    function = "function"
    packed_metadata = "metadata"

    def __init__(self, kernel: _Kernel) -> None:
        self.kernel = kernel

    def run(self, x: int, y: int, z: int, stream: object, *args: Any) -> None:
        assert args[:5] == ("function", "metadata", None, None, None)
        self.kernel.ran.append(((x, y, z), *args[5:]))


@pytest.fixture(autouse=True)
def driver() -> Iterator[Driver]:
    """Triton launches through a driver that records launches."""
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    launching._compiled.clear()
    yield driver
    launching._compiled.clear()
    triton.runtime.driver.set_active(None)


def test_a_kernel_is_compiled_once_for_arguments_of_a_kind() -> None:
    kernel = _Kernel()
    values = torch.zeros(2, 64)
    for row in values:  # both addresses are multiples of 16
        launching.launch(kernel, (5,), (row, None), (3, 0.5, "silu"), 4)
    assert [args[:2] for args in kernel.compiled] == [((5,), 4)]
    ((grid, *args),) = kernel.ran
    assert grid == (5, 1, 1)
    assert args[0].data_ptr() == values[1].data_ptr()
    assert args[1:] == [None, 3, 0.5, "silu"]


@pytest.mark.parametrize(
    ("tensors", "numbers", "num_warps"),
    [
        ((torch.zeros(65)[1:], None), (3,), 4),  # not at a multiple of 16 bytes
        ((torch.zeros(64, dtype=torch.bfloat16), None), (3,), 4),
        ((torch.zeros(64), torch.zeros(64)), (3,), 4),
        ((torch.zeros(64), None), (16,), 4),
        ((torch.zeros(64), None), (3,), 8),
    ],
    ids=["address", "dtype", "none", "number", "warps"],
)
def test_a_kernel_is_compiled_anew_for_arguments_of_another_kind(
    tensors: tuple[Any, ...], numbers: tuple[Any, ...], num_warps: int
) -> None:
    kernel = _Kernel()
    launching.launch(kernel, (5,), (torch.zeros(64), None), (3,), 4)
    launching.launch(kernel, (5,), tensors, numbers, num_warps)
    assert len(kernel.compiled) == 2
    assert not kernel.ran


def test_forgotten_kernels_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_MOST_KEPT", 2)
    kernel = _Kernel()
    row = torch.zeros(64)
    for number in (1, 2, 3, 1):
        launching.launch(kernel, (1,), (row,), (number,), 4)
    assert len(kernel.compiled) == 4


@pytest.mark.parametrize("error", [AttributeError, TypeError])
def test_a_kernel_that_cannot_be_launched_directly_is_launched_by_triton(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: _Compiled, *args: Any) -> Any:
        raise error("no such interface in this release")

    monkeypatch.setattr(_Compiled, "run", refuse)
    kernel = _Kernel()
    row = torch.zeros(64)
    with caplog.at_level(logging.WARNING):
        for number in (1, 1, 1, 2, 2):
            launching.launch(kernel, (5,), (row, None), (number,), 4)
    assert [args[-1] for args in kernel.compiled] == [1, 1, 1, 2, 2]
    (message,) = [m for m in caplog.messages if error.__name__ in m]
    assert "no such interface in this release" in message


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no launcher"
)
def test_tritons_launcher_gets_the_same_arguments_from_both_launches(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel is compiled for an H100; its driver records the arguments.  Hooks are called."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched: list[tuple[object, ...]] = []
    monkeypatch.setattr(driver, "_launch", lambda *given: launched.append(given))
    glu: Any = importlib.import_module("megatron.core.fusions.triton.glu")
    tensors = torch.zeros(2, 256), None, torch.zeros(2, 128)
    numbers = 128, 0.0, 1, "silu", False, False, 128
    hook = triton.knobs.runtime.launch_enter_hook
    for is_profiled in (False, False, True):
        if is_profiled:
            hook.add(print)
        launching.launch(glu._forward, (2,), tensors, numbers, 4)
    hook.remove(print)
    glu._forward.device_caches.clear()
    by_triton, direct, profiled = launched
    # Grid, stream, function and metadata; an object for hooks and the hooks; the arguments.
    assert by_triton[:6] == direct[:6] == profiled[:6]
    assert direct[6:9] == (None, None, None)
    assert hook in profiled[6:9]
    assert by_triton[9:] == direct[9:] == profiled[9:] == (*tensors, *numbers)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 2**20])
def test_powers_of_2_are_those_of_triton(size: int) -> None:
    assert launching.power_of_2(size) == triton.next_power_of_2(size)
