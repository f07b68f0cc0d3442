"""Compile every kernel that tests/gpu asks for, for one kind of GPU, where there is none.

    python -m tests.gpu.compiling [80|90|100] [arguments of pytest]      (90, an H100, by default)

The tests run on tensors of the CPU; a launch ends after ptxas, and nothing is compared.
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
    triton = importlib.import_module("triton")
    triton.runtime.driver.set_active(_Driver(architecture))
    run = triton.runtime.JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **{**kwargs, "warmup": True})

    triton.runtime.JITFunction.run = compile_only
    for module in pkgutil.iter_modules(ours.__path__):
        importlib.import_module(f"{ours.__name__}.{module.name}")
    os.environ["TRITON_INTERPRET"] = "1"  # too late for the kernels; the tests take the CPU
    torch.testing.assert_close = lambda *args, **kwargs: None
    return pytest.main(["-q", "-p", "no:cacheprovider", "tests/gpu", *arguments])


if __name__ == "__main__":
    sys.exit(main())
