"""What a process that computes on a CPU sets once, before its first large tensor.

Memory: each step frees and asks for the same blocks again.  glibc hands large ones back to the
kernel, which clears every page anew at the next use, a tenth of a step and more.

Products: oneDNN multiplies float32 faster than MKL on some machines.  torch calls it where it is
allowed bfloat16 inside float32 products; a CPU without such instructions then still computes in
float32, which is tried before it is relied on.
"""

from __future__ import annotations

import ctypes
import platform
import sys

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_NARROWEST = 256  # hidden size from which oneDNN makes its cost per call good
_SIZE = 256


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step: the process stays at its peak.  False without glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, -1) and mallopt(_M_MMAP_MAX, 0))


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16 matmuls; without them they are far slower.

    oneDNN obeys ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA; what it says is what happens.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        platform.machine() not in ("x86_64", "AMD64")
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )


def choose_float32_products(hidden_size: int) -> bool:
    """Multiply float32 matrices in oneDNN where that is exact; whether it is done.

    Leaves a precision alone that somebody has set.
    """
    if hidden_size < _NARROWEST or torch.get_float32_matmul_precision() != "highest":
        return False
    torch.set_float32_matmul_precision("medium")
    if _products_are_float32():
        return True
    torch.set_float32_matmul_precision("highest")
    return False


def _products_are_float32() -> bool:
    """Whether a product keeps a digit that bfloat16 and tf32 lose."""
    x = torch.full((_SIZE, _SIZE), 1 + 2**-20)
    return torch.equal(x @ torch.eye(_SIZE), x)
