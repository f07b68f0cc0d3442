"""cuBLAS's GEMM of 16-bit matrices that adds to a matrix in fp32, which the CPU does not have."""

from __future__ import annotations

import torch
from torch import Tensor


def register() -> torch.library.Library:
    """Register the GEMM for the device, as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", _addmm, "CUDA")
    return library


def _addmm(
    total: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    assert a.dtype == b.dtype, "cuBLAS multiplies matrices of one dtype"
    assert a.dtype in (torch.float16, torch.bfloat16), "out_dtype is for 16-bit matrices"
    assert total.dtype == out.dtype == out_dtype == torch.float32
    for matrix in (a, b):
        assert 1 in matrix.stride(), "cuBLAS reads rows or columns of adjacent values"
    product = alpha * a.float() @ b.float()
    return out.copy_(product if beta == 0 else product + beta * total)
