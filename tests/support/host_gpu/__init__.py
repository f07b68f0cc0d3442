"""A fake CUDA device with memory and operations of the host: GPU code paths on any machine.

    python -m tests.support.host_gpu pretrain_gpt.py --device cuda ...   (also: torchrun ... -m)
    python -m tests.support.host_gpu pytest tests/functional   runs of tests take --device cuda

Its tensors are of another device than the host's: to mix them is an error, backward passes run in
a thread of their own, collectives take them.  Kernels of Triton are missing, or interpreted under
TRITON_INTERPRET=1.  It needs g++; a torch that is built with CUDA serves too.  What it cannot show:
speed, what runs late, and what a GPU's own kernels do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ASKED = "TESTS_HOST_GPU"  # the compiled device; set where a process is to find a GPU
# Backends of ranks with gloo for the host and NCCL, for which gloo stands in, for their devices.
# The third device has no tensors: it tells this group from one of gloo alone.
LIKE_BOTH = "cpu:gloo,cuda:gloo,xpu:gloo"
_HERE = Path(__file__).resolve().parent


def build(folder: Path) -> Path:
    """Compile the device, if it is not there for this release of torch; needs no GPU, and g++."""
    spec = importlib.util.find_spec("torch")  # found, not imported: see `load`
    assert spec is not None
    assert spec.origin is not None
    torch, torch_version = Path(spec.origin).parent, importlib.metadata.version("torch")
    source = _HERE / "device.cpp"
    compiled = folder / f"host_gpu_{torch_version}_{int(source.stat().st_mtime)}.so"
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        includes = [torch / "include", torch / "include/torch/csrc/api/include"]  # and pybind11's
        includes.append(sysconfig.get_paths()["include"])
        partial = compiled.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [
                *("g++", "-O1", "-shared", "-fPIC", "-std=c++20", "-w", str(source)),
                *(f"-I{folder}" for folder in includes),
                *(f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
                *("-ltorch", "-ltorch_cpu", "-lc10", "-o", str(partial)),
            ],
            check=True,
        )
        partial.rename(compiled)
    return compiled


def is_asked() -> bool:
    """Whether processes of this test session are to find the device."""
    return ASKED in os.environ


def load() -> None:
    """Let this process find the device, if it is asked for.

    Torch must not have been imported: it asks once what accelerators there are.
    """
    if not is_asked() or f"{__name__}.torch_cuda" in sys.modules:
        return  # the second: this process was forked from one that has found it
    assert "torch" not in sys.modules
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.modules["triton"] = None  # type: ignore[assignment]
    spec = importlib.util.spec_from_file_location("host_gpu_cpp", os.environ[ASKED])
    assert spec is not None
    assert spec.loader is not None
    compiled: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled)
    importlib.import_module("tests.support.host_gpu.torch_cuda").install(compiled)
