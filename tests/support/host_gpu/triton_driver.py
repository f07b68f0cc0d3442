"""Triton's own CUDA driver and launcher over an emulated libcuda.so.1, which runs no kernel.

Kernels are compiled for a GPU and launched as on one: Triton's Python code and its compiled
launcher run.  Needs gcc.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).resolve().parent / "cuda_driver.c"
_MOST = 64  # parameters of a kernel; as in the source
_Three = ctypes.c_uint * 3
_Parameters = (ctypes.c_ubyte * 8) * _MOST


class Launch(ctypes.Structure):
    """The last launch, as the driver received it; its fields are those of the source."""

    _fields_ = (
        ("grid", _Three),
        ("block", _Three),
        ("shared", ctypes.c_uint),
        ("attributes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("launches", ctypes.c_long),
        ("count", ctypes.c_int),
        ("sizes", ctypes.c_int * _MOST),
        ("parameters", _Parameters),
    )

    def expect(self, ptx: str) -> None:
        """Copy the parameters of the kernel whose assembly is ``ptx`` in the next launches."""
        head = ptx[ptx.index(".entry") :].split(")", 1)[0]
        bits = [int(number) for number in re.findall(r"\.param\s+\.[a-z]+(\d+)", head)]
        assert bits, head
        self.count = len(bits)
        self.sizes[: len(bits)] = [number // 8 for number in bits]

    def values(self) -> tuple[object, ...]:
        """Return all that the driver received."""
        given = (tuple(self.parameters[i]) for i in range(self.count))
        sizes = tuple(self.grid), tuple(self.block), self.shared, self.attributes
        return (*sizes, self.stream, self.function, *given)


def cuda_driver(folder: Path, architecture: int = 90) -> tuple[Any, Launch]:
    """Return Triton's driver for a GPU of this compute capability, and its last launch.

    ``folder``: where the emulated library is built.  One library serves the process.
    """
    library = ctypes.CDLL(str(_build(folder)), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("triton.knobs").nvidia.libcuda_path = str(folder)
    nvidia: Any = importlib.import_module("triton.backends.nvidia.driver")
    nvidia.library_dirs.cache_clear()
    nvidia.libcuda_dirs.cache_clear()
    driver = nvidia.CudaDriver()
    # These ask torch, which has no GPU.
    driver.get_current_device = lambda: 0
    driver.get_current_stream = lambda _=0: 0
    driver.get_device_capability = lambda _=0: divmod(architecture, 10)
    return driver, Launch.in_dll(library, "emulated_launch")


def _build(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"  # the name that Triton's launcher opens
    nvidia: Any = importlib.import_module("triton.backends.nvidia")
    partial = folder / f"partial.{os.getpid()}"
    include = Path(nvidia.__file__).parent / "include"
    names = f"-Wl,-soname,{library.name}", f"-I{include}", "-o", str(partial)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(_SOURCE), *names], check=True)
    partial.rename(library)
    return library
