"""Compile every kernel that tests/gpu asks for, for one kind of GPU, where there is none.

    python -m tests.support.kernel_compiling [80|90|100] [--once] [arguments of pytest]

The target is a compute capability, 90 (an H100) by default.  With --once, each kernel is compiled
for the first arguments that a test gives it, and not for those of other tests; for an H100, it must
not spill registers.  The tests run on tensors of the CPU; a launch ends in an emulated driver, and
nothing is compared but the shared memory with that of the GPU, and what the driver receives from
Triton with what it receives from `fusions.triton.launch`.  Needs gcc.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.fusions import triton as ours
from tests.gpu import TARGET
from tests.support.host_gpu.triton_driver import cuda_driver

_STACK_BYTES = 64  # of a thread; with Triton 3.6 at most 40, with 3.9 at most 24
_SHARED_BYTES = {80: 163 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10}  # that a block can have


def main() -> int:
    """Exit code of pytest: not 0 where a kernel does not compile."""
    arguments = sys.argv[1:]
    architecture = int(arguments.pop(0)) if arguments and arguments[0].isdigit() else 90
    is_once = "--once" in arguments
    triton = importlib.import_module("triton")
    driver, last = cuda_driver(Path(tempfile.mkdtemp()), architecture)
    triton.runtime.driver.set_active(driver)
    run = triton.runtime.JITFunction.run
    launching: Any = importlib.import_module("megatron.core.fusions.triton.launch")
    compiled = set()

    def compile_only(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        if is_once and self.fn in compiled:
            return
        compiled.add(self.fn)
        kernel = run(self, *args, **{**kwargs, "grid": grid, "warmup": True})
        assert kernel.metadata.shared <= _SHARED_BYTES[architecture], self.fn.__name__
        if is_once and architecture == 90:
            spilled = _stack_bytes(kernel.asm["cubin"])
            assert spilled <= _STACK_BYTES, f"{self.fn.__name__} spills {spilled} bytes a thread"
        if set(kwargs) - {"warmup", "num_warps"}:
            return  # `launch` passes all arguments by position
        last.expect(kernel.asm["ptx"])
        run(self, *args, grid=grid, **kwargs)
        by_triton = last.values()
        launching._launch_directly(kernel, 0, (*grid, 1, 1)[:3], args)
        assert last.values() == by_triton, self.fn.__name__

    triton.runtime.JITFunction.run = compile_only
    for module in pkgutil.iter_modules(ours.__path__):
        importlib.import_module(f"{ours.__name__}.{module.name}")
    # The tensors are on the CPU, which does not tell how long chunks are on this GPU.
    scan: Any = importlib.import_module(f"{ours.__name__}.scan")
    has_memory = architecture >= 90
    scan._has_large_tiles = lambda where, dtype: has_memory and dtype.itemsize == 2
    os.environ["TRITON_INTERPRET"] = "1"  # too late for the kernels; the tests take the CPU
    os.environ[TARGET] = str(architecture)
    torch.testing.assert_close = lambda *args, **kwargs: None
    rest = [word for word in arguments if word != "--once"]
    return pytest.main(["-q", "-p", "no:cacheprovider", "tests/gpu", *rest])


def _stack_bytes(cubin: bytes) -> int:
    """Return the bytes of a thread's stack, where the compiler puts what has no register."""
    triton: Any = importlib.import_module("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(tool), "-res-usage", file.name]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r" STACK:(\d+) ", text)
    assert found, text
    return int(found[1])


if __name__ == "__main__":
    sys.exit(main())
