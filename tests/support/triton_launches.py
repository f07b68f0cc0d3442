"""Record launches of Triton kernels and lower them for a GPU, on a machine without one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments in the order of its parameters or by name, and the grid."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rpartition('.')[2]}.{self.kernel.__name__}"

    @property
    def numbers(self) -> dict[str, int]:
        """The integer arguments by name."""
        given = dict(zip(self.kernel.arg_names, self.args, strict=False)) | self.kwargs
        return {name: n for name, n in given.items() if type(n) is int}


class _Driver:
    """Name the GPU that Triton compiles for."""

    def __init__(self, capability: int) -> None:
        compiler = importlib.import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Let Triton compile for a GPU of this compute capability."""
    driver = importlib.import_module("triton").runtime.driver
    driver.set_active(_Driver(capability))
    try:
        yield
    finally:
        driver.set_active(None)


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Return the launches of ``call``, which run nothing: its tensors may be without memory."""
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, grid, args, kwargs))

    function: Any = importlib.import_module("triton").runtime.JITFunction
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "run", record)
        call()
    return launches


def lowered(launch: Launch, stage: str) -> tuple[str, dict[str, Any]]:
    """Return the code of ``stage`` (ttir, ttgir, llir or ptx) and what the compiler reports."""
    compiler: Any = importlib.import_module("triton.compiler.compiler")
    kernel = launch.kernel
    _, _, target, backend, binder = kernel.create_binder()
    bound, specialization, _ = binder(*launch.args, **launch.kwargs, debug=False)
    given = {**launch.kwargs, "debug": False}
    packed = kernel._pack_args(backend, given, bound, specialization, None)
    options, signature, constants, attributes = packed
    source = compiler.ASTSource(kernel, signature, constants, attributes)
    context = compiler.ir.context()
    compiler.ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    report: dict[str, Any] = {"target": target, **options.__dict__}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    for name, lower in stages.items():
        module = lower(module, report)
        if name == stage:
            return str(module), report
    raise ValueError(f"no stage {stage!r} among {', '.join(stages)}")


def specialization_of(launch: Launch) -> tuple[object, ...]:
    """Return what decides the compiled code: equal for launches of the same code."""
    numbers = {n: (v % 16 == 0, v == 1, v >= 2**31) for n, v in launch.numbers.items()}
    constants = {p.name: launch.numbers.get(p.name) for p in launch.kernel.params if p.is_constexpr}
    kinds = [t.dtype if isinstance(t, Tensor) else type(t) for t in launch.args]
    options = {n: v for n, v in launch.kwargs.items() if n not in numbers}
    return launch.name, str(kinds), str(sorted({**numbers, **constants}.items())), str(options)
