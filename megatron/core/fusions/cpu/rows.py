"""The sum of each token's rows: [m, h] -> [n, h], each row read once and each sum written once."""

from __future__ import annotations

from torch import Tensor

from megatron.core.device import cpu_kernels


def sum_of_rows(rows: Tensor, row: Tensor) -> Tensor:
    """``row`` [n, k]: the rows of a token; a number of m or more stands for none.

    Sums are in the order of visits, in float32.
    """
    width, (tokens, visits) = rows.shape[1], row.shape
    out = rows.new_empty(tokens, width)
    cpu_kernels.run(
        "sum_of_rows",
        [rows, row.contiguous(), out],
        format=rows.dtype,
        sizes=(width, visits, len(rows)),
        count=tokens,
        width=max(1, width * visits),
    )
    return out
