"""`fusions.triton.launch` keeps compiled kernels; their results are tested in tests/gpu."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.fusions.triton import launch as launching
from tests.host_gpu.host_time import Driver


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
    def __init__(self, kernel: _Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert len(grid) == 3, "a compiled kernel has a grid of three"
        return lambda *args: self.kernel.ran.append((grid, *args))


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
    def refuse(self: _Compiled, grid: tuple[int, ...]) -> Any:
        raise error("no such interface in this release")

    monkeypatch.setattr(_Compiled, "__getitem__", refuse)
    kernel, row = _Kernel(), torch.zeros(64)
    with caplog.at_level(logging.WARNING):
        for number in (1, 1, 1, 2, 2):
            launching.launch(kernel, (5,), (row, None), (number,), 4)
    assert [args[-1] for args in kernel.compiled] == [1, 1, 1, 2, 2]
    (message,) = [m for m in caplog.messages if error.__name__ in m]
    assert "no such interface in this release" in message


def test_tritons_launcher_gets_the_same_arguments_from_both_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel is compiled for an H100; its driver records the arguments."""
    triton: Any = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has no launcher")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched: list[tuple[object, ...]] = []
    driver = Driver()
    monkeypatch.setattr(driver, "_launch", lambda *given: launched.append(given))
    triton.runtime.driver.set_active(driver)
    try:
        glu: Any = importlib.import_module("megatron.core.fusions.triton.glu")
        tensors = torch.zeros(2, 256), None, torch.zeros(2, 128)
        numbers = 128, 0.0, 1, "silu", False, False, 128
        for _ in range(2):
            launching.launch(glu._forward, (2,), tensors, numbers, 4)
    finally:
        launching._compiled.clear()
        glu._forward.device_caches.clear()
        triton.runtime.driver.set_active(None)
    first, second = launched
    assert first[9:] == second[9:] == (*tensors, *numbers)
    # All but the object for hooks: grid, stream, function, metadata and hooks.
    assert (*first[:6], *first[7:9]) == (*second[:6], *second[7:9])


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 2**20])
def test_powers_of_2_are_those_of_triton(size: int) -> None:
    triton = pytest.importorskip("triton")
    assert launching.power_of_2(size) == triton.next_power_of_2(size)
