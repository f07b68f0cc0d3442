"""Sum the rows of each token: [m, h] -> [n, h], one read per row and one write per sum."""

from __future__ import annotations

from torch import Tensor

from megatron.core.device import cpu_kernels


def sum_of_rows(rows: Tensor, row: Tensor) -> Tensor:
    """Sum ``row`` [n, k], the row numbers of each token; numbers >= m mean no row.

    Sums are in float32, in the order of the k entries.
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
