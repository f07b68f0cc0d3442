"""Select kernels: Triton on a GPU, C++ on a CPU, else plain torch."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.optional import available, why_missing

_FLOAT64 = torch.float64
_is_compiling = torch.compiler.is_compiling
_ON_CPU = {"adam", "cross_entropy", "glu", "permute", "rope"}  # that fusions.cpu.ops has


def find(name: str, *tensors: Tensor | None) -> ModuleType | None:
    """Return the module ``fusions.triton.<name>`` or `fusions.cpu.ops`; None for plain torch.

    None also without triton or the compiled kernels, in float64, and inside torch.compile, which
    fuses by itself.  Functions of the same name have the same arguments, contiguous tensors.
    """
    if _is_compiling():
        return None
    # A GPU's host asks several times per layer: no generators, no lists.
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype is _FLOAT64 or not device.launches_kernels(tensor.device):
            break
    else:
        return _module(name)
    if name in _ON_CPU and all(cpu_kernels.take(t) for t in tensors if t is not None):
        return importlib.import_module("megatron.core.fusions.cpu.ops")
    return None


def is_available(name: str, *tensors: Tensor) -> bool:
    """Return whether `find` has a kernel; on a simulated GPU, whether a real one would have it."""
    is_simulated = all(t.is_meta and device.is_cuda(t.device) for t in tensors)
    return is_simulated or find(name, *tensors) is not None


def kernel_backend(dtype: torch.dtype) -> str:
    """Name the backend of fused operations of ``dtype`` on this device, for the start-up log."""
    if device.launches_kernels(device.current()):
        kind, reason = "Triton", why_missing("triton")
    else:
        kind, reason = "C++", cpu_kernels.unsupported_reason(dtype)
    return f"kernels in {kind}" if reason is None else f"PyTorch alone: {reason}"


@cache
def _module(name: str) -> ModuleType | None:
    if not available("triton"):
        return None
    return importlib.import_module(f"megatron.core.fusions.triton.{name}")
