"""Matmuls whose rows do not depend on each other: x W^T + b with one configuration of tiles.

cuBLAS selects a kernel by the number of rows, and kernels sum in different orders.  Here every
program computes 16 rows of x with 64 rows of W, and sums along k in steps of 64: so the bits of a
row depend on that row and on W alone.  Slower than cuBLAS for many rows: the price of invariance.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
_COLUMNS = 64
_STEP = 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute [m, k], [n, k], [n] -> [m, n] in the dtype of x, which is that of the weight."""
    (m, k) = x.shape
    n = weight.shape[0]
    y = x.new_empty(m, n)
    if not y.numel():
        return y
    # One dimension: the others of a grid end at 65535.
    _linear[(triton.cdiv(n, _COLUMNS) * triton.cdiv(m, _ROWS),)](
        x,
        weight,
        bias,
        y,
        m,
        n,
        k,
        *x.stride(),
        *weight.stride(),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        STEP=_STEP,
        num_warps=4,
        num_stages=3,
    )
    return y


@triton.jit
def _linear(
    X,
    Weight,
    Bias,
    Y,
    m,
    n,
    k,
    x_row,
    x_column,
    weight_row,
    weight_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    across = tl.cdiv(n, COLUMNS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    is_row = row < m
    is_column = column < n
    at_x = row.to(tl.int64) * x_row
    at_weight = column.to(tl.int64) * weight_row
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, k, STEP):
        inner = (start + tl.arange(0, STEP)).to(tl.int64)  # a transposed matrix has wide columns
        is_inner = inner < k
        a = tl.load(
            X + at_x[:, None] + inner[None, :] * x_column,
            mask=is_row[:, None] & is_inner[None, :],
            other=0.0,
        )
        b = tl.load(
            Weight + at_weight[None, :] + inner[:, None] * weight_column,
            mask=is_inner[:, None] & is_column[None, :],
            other=0.0,
        )
        sums = tl.dot(a, b, sums, input_precision="ieee")
    if Bias is not None:
        sums += tl.load(Bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        Y + row.to(tl.int64)[:, None] * n + column[None, :],
        sums.to(Y.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
