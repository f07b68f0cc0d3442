"""`fusions.triton.launch` keeps compiled kernels; their results are tested in tests/gpu.

What it assumes of Triton's launcher is asserted for the installed release: its source, and what the
driver receives from its compiled launcher.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.host_gpu.triton_driver import cuda_driver
from tests.support.ranks import run_ranks

triton: Any = pytest.importorskip("triton")
launching: Any = importlib.import_module("megatron.core.fusions.triton.launch")
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class _Kernel:
    """What `launch` asks of a kernel of Triton; it writes down what was compiled and what ran."""

    def __init__(self) -> None:
        self.arg_names: tuple[str, ...] = ()
        self.compiled: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*args: Any, num_warps: int) -> Any:
            self.arg_names = self.arg_names or ("name",) * len(args)
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
def _driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    driver = SimpleNamespace(get_current_stream=lambda where: "stream")
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    launching._compiled.clear()
    launching._is_compared.cache_clear()
    yield
    launching._compiled.clear()
    launching._is_compared.cache_clear()


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


@pytest.mark.parametrize("release", ["3.5.1", "3.10.0", "4.0.0"])
def test_a_release_whose_launcher_is_unknown_launches_all_kernels_itself(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "__version__", release)
    kernel = _Kernel()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            launching.launch(kernel, (5,), (torch.zeros(64),), (3,), 4)
    assert len(kernel.compiled) == 3
    assert not kernel.ran
    (message,) = [m for m in caplog.messages if release in m]
    assert "Triton's own launcher" in message


def test_an_argument_that_is_left_to_its_default_is_an_error() -> None:
    """Triton 3.9's compiled launcher would read behind the end of the arguments."""
    kernel = _Kernel()
    kernel.arg_names = "tensor", "number", "default"
    with pytest.raises(AssertionError, match="default"):
        launching.launch(kernel, (5,), (torch.zeros(64),), (3,), 4)


def test_the_installed_release_is_known() -> None:
    assert launching._is_compared(triton.__version__)


def test_triton_calls_run_of_a_compiled_kernel_as_a_direct_launch_does() -> None:
    source = textwrap.dedent(inspect.getsource(triton.runtime.jit.JITFunction.run))
    calls = [
        [ast.unparse(given) for given in node.args]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernel.run"
    ]
    assert calls == [
        [
            *("grid_0", "grid_1", "grid_2", "stream", "kernel.function", "kernel.packed_metadata"),
            *("launch_metadata", "knobs.runtime.launch_enter_hook"),
            *("knobs.runtime.launch_exit_hook", "*bound_args.values()"),
        ]
    ]


def test_tritons_cuda_launcher_and_hooks_have_the_parameters_of_a_direct_launch() -> None:
    nvidia: Any = importlib.import_module("triton.backends.nvidia.driver")
    parameters = list(inspect.signature(nvidia.CudaLauncher.__call__).parameters)
    assert parameters[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"]
    after = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]
    assert parameters[6:] in (["args"], [*after, "args"])  # 3.6 passes them on
    compiled = triton.compiler.CompiledKernel
    assert isinstance(compiled.run, property)
    for name in ("function", "packed_metadata"):
        assert f"self.{name} = " in inspect.getsource(compiled.__init__)
    for hook in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        assert hook.calls == []


@pytest.mark.skipif(_IS_INTERPRETED, reason="the interpreter has no launcher")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the launcher is compiled by gcc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own driver is loaded")
def test_the_driver_receives_the_same_from_a_direct_launch_and_from_triton(tmp_path: Path) -> None:
    run_ranks(_launch_both_ways, 1, tmp_path)


def _launch_both_ways(rank: int, world_size: int, folder: Path) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    driver, last = cuda_driver(folder)
    triton.runtime.driver.set_active(driver)
    glu: Any = importlib.import_module("megatron.core.fusions.triton.glu")
    numbers = 128, 0.0, 1, "silu", False, 128
    two, three = ((torch.zeros(n, 256), None, torch.zeros(n, 128)) for n in (2, 3))
    kernel = glu._forward[(2,)](*two, *numbers, num_warps=4)
    last.expect(kernel.asm["ptx"])
    assert last.count == 6  # two pointers, two numbers that Triton does not fix, scratch memory
    launched: list[tuple[object, ...]] = []
    hook = triton.knobs.runtime.launch_enter_hook
    for tensors in (two, three):
        launching.launch(glu._forward, (3,), tensors, numbers, 4)  # by Triton, then directly
        assert launching._compiled
        launched.append(last.values())
        glu._forward[(3,)](*tensors, *numbers, num_warps=4)
        assert last.values() == launched[-1]
        addresses = [int.from_bytes(last.parameters[i], "little") for i in (0, 1)]
        assert addresses == [tensors[0].data_ptr(), tensors[2].data_ptr()]
    assert launched[0][:6] == launched[1][:6]
    assert last.launches == 5
    hook.add(lambda metadata: launched.append(metadata.get()["name"]))
    launching.launch(glu._forward, (3,), three, numbers, 4)
    assert launched[2:] == ["_forward"]
    assert last.values() == launched[1]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 2**20])
def test_powers_of_2_are_those_of_triton(size: int) -> None:
    assert launching.power_of_2(size) == triton.next_power_of_2(size)
