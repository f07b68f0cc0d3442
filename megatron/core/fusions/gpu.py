"""Where kernels in Triton stand in for plain torch."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.optional import available

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernels(name: str, *tensors: Tensor | None) -> ModuleType | None:
    """Module ``fusions.triton.<name>`` for ``tensors`` that lie on a GPU; None for plain torch.

    None too without triton, in float64, and inside torch.compile, which fuses by itself.
    """
    if torch.compiler.is_compiling():
        return None
    given = [t for t in tensors if t is not None]
    if not all(device.launches_kernels(t.device) and t.dtype in _DTYPES for t in given):
        return None
    return _module(name)


@cache
def _module(name: str) -> ModuleType | None:
    if not available("triton"):
        return None
    return importlib.import_module(f"megatron.core.fusions.triton.{name}")
