"""Process settings for computing on a CPU; set them once, before the first large tensor.

Memory: each step frees and allocates the same blocks.  glibc returns large blocks to the operating
system, which zeroes every page at the next use; that takes 10 % of a step or more.  One thread
reads large tensors a quarter faster from pages of 2 MiB than from pages of 4 KiB, because of
address translation.

GEMMs: oneDNN multiplies float32 matrices faster than MKL on some machines.  torch calls oneDNN only
if bfloat16 is allowed inside float32 matmuls; a CPU without bfloat16 instructions still computes in
float32, which is tested before the setting is used.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

_MADV_HUGEPAGE = 14  # constant of sys/mman.h
_HUGE_PAGE = 2 << 20
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # constants of malloc.h
_NARROWEST = 256  # smallest hidden size at which oneDNN is faster despite its cost per call
_SIZE = 256


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; return False without glibc.

    The resident memory of the process then stays at its peak.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, -1) and mallopt(_M_MMAP_MAX, 0))


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Ask Linux for pages of 2 MiB in the memory of large CPU tensors.

    Call it before values are written: only memory without pages gets huge ones.  A kernel without
    transparent huge pages ignores the request.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        if not tensor.is_cpu or tensor.nbytes < _HUGE_PAGE:
            continue
        # Whole pages: neighbours in the heap share the first and the last one.
        start = tensor.data_ptr() // _HUGE_PAGE * _HUGE_PAGE
        stop = -(-(tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE) * _HUGE_PAGE
        madvise(start, stop - start, _MADV_HUGEPAGE)


def multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for bf16 matmuls, which are far slower without.

    Asks oneDNN, which respects ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        platform.machine() not in ("x86_64", "AMD64")
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )


def choose_float32_products(hidden_size: int) -> bool:
    """Let oneDNN multiply float32 matrices if it does so in float32; return whether it does.

    Does not change a matmul precision that the caller has set.
    """
    if hidden_size < _NARROWEST or torch.get_float32_matmul_precision() != "highest":
        return False
    torch.set_float32_matmul_precision("medium")
    if _products_are_float32():
        return True
    torch.set_float32_matmul_precision("highest")
    return False


def _products_are_float32() -> bool:
    """Return whether a matmul keeps a bit that bfloat16 and tf32 lose."""
    x = torch.full((_SIZE, _SIZE), 1 + 2**-20)
    return torch.equal(x @ torch.eye(_SIZE), x)
