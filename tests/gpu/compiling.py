"""Compile every kernel that tests/gpu asks for, for one kind of GPU, where there is none.

    python -m tests.gpu.compiling [80|90|100] [--once] [arguments of pytest]

The target is a compute capability, 90 (an H100) by default.  With --once, each kernel is compiled
for the first arguments that a test gives it, and not for those of other tests.  The tests run on
tensors of the CPU; a launch ends after ptxas, and nothing is compared but the shared memory with
that of the GPU.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Any

import pytest
import torch

from megatron.core.fusions import triton as ours
from tests.gpu import TARGET

_SHARED_BYTES = {80: 163 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10}  # that a block can have


class _Driver:
    """What triton asks of a driver before it launches."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        return target("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def main() -> int:
    """Exit code of pytest: not 0 where a kernel does not compile."""
    arguments = sys.argv[1:]
    architecture = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 90
    is_once = "--once" in arguments
    triton = importlib.import_module("triton")
    triton.runtime.driver.set_active(_Driver(architecture))
    run = triton.runtime.JITFunction.run
    compiled = set()

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_once or self.fn not in compiled:
            compiled.add(self.fn)
            kernel = run(self, *args, **{**kwargs, "warmup": True})
            assert kernel.metadata.shared <= _SHARED_BYTES[architecture], self.fn.__name__

    triton.runtime.JITFunction.run = compile_only
    for module in pkgutil.iter_modules(ours.__path__):
        importlib.import_module(f"{ours.__name__}.{module.name}")
    os.environ["TRITON_INTERPRET"] = "1"  # too late for the kernels; the tests take the CPU
    os.environ[TARGET] = str(architecture)
    torch.testing.assert_close = lambda *args, **kwargs: None
    rest = [word for word in arguments if word != "--once"]
    return pytest.main(["-q", "-p", "no:cacheprovider", "tests/gpu", *rest])


if __name__ == "__main__":
    sys.exit(main())
