"""GEMMs fused with a collective of sequence parallelism.

torch divides such a GEMM by ranks: while one part is computed, the next is copied through symmetric
memory, which the GPUs of a group map into each other's address space.

``s`` tokens, ``b`` sequences, ``t`` = s b, ``i``/``o`` input and output width of the GEMM, ``tp``
ranks of the group.  Each method is one collective over the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.fusions.quantize import in_rows, product
from megatron.core.low_precision import Scaled, is_added_by_gemm
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.tensor_parallel.quantized_linear import gathered_codes
from megatron.core.tensor_parallel.weight_gradient import WeightGrad, is_deferred


@dataclass(frozen=True)
class Overlap:
    """Which collectives of a layer over ``group`` run inside of their GEMM."""

    group: ProcessGroup
    gathers: bool  # all-gathers of inputs (column), and of output gradients (row)
    scatters: bool  # reduce-scatters of outputs (row)
    scatters_gradients: bool  # reduce-scatters of input gradients (column)

    def gathered_product(self, x: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of all ranks, [s, b, i], and their product with ``matrix`` [i, o]."""
        if not self.gathers:
            rows = all_gather_first_dim(x, self.group)
            return rows, rows @ matrix
        gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), [matrix], 0, self.group.group_name
        )
        return gathered, y

    def scattered_product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks of x @ matrix: [s, b, i] -> [s/tp, b, o].

        ``matrix`` is [i, o].
        """
        y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x.contiguous(), matrix, "sum", 0, self.group.group_name
        )
        return y

    def gathered_product_of_codes(
        self,
        x: Scaled,
        matrix: Scaled,
        dtype: torch.dtype,
        *,
        bias: Tensor | None = None,
        fast: bool = False,
    ) -> tuple[Scaled, Tensor]:
        """Return the rows of all ranks, [t, i], and their product with ``matrix`` [o, i]^T.

        ``x`` [t/tp, i] has one scale, which is the same on all ranks.  ``bias`` [o], in ``dtype``,
        and ``fast`` as in `product`.
        """
        if not self.gathers:
            rows = gathered_codes(x, self.group)
            return rows, product(rows, matrix, dtype, bias=bias, fast=fast)
        is_added = is_added_by_gemm(bias, dtype)
        codes, (y,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            x.codes.contiguous(),
            [_columns(matrix)],
            x.scale,
            [matrix.scale],
            0,
            self.group.group_name,
            [bias if is_added else None],
            [None],  # scale of the result
            [dtype],
            [fast],
        )
        y = y if bias is None or is_added else y + bias
        return Scaled(codes, x.scale), y

    def scattered_product_of_codes(
        self, x: Scaled, matrix: Scaled, dtype: torch.dtype, *, fast: bool = False
    ) -> Tensor:
        """Return this rank's rows of the sum over ranks of x @ matrix^T: [t, i] -> [t/tp, o].

        ``matrix`` is [o, i]; each matrix has one scale.  ``fast`` as in `product`.
        """
        y: Tensor = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            x.codes.contiguous(),
            _columns(matrix),
            x.scale,
            matrix.scale,
            "sum",
            0,
            0,
            self.group.group_name,
            [len(x.codes), len(matrix.codes)],
            out_dtype=dtype,
            use_fast_accum=fast,
        )
        return y


def scattering_backward(
    item: WeightGrad, scattered_grad_x: Callable[[], Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what `linear_backward` returns; ``scattered_grad_x`` sums over ranks itself."""
    is_later = is_deferred(item)
    if not is_later:
        item.start()
    grad_x = scattered_grad_x()
    return grad_x, *((None, None) if is_later else item.compute())


def _columns(matrix: Scaled) -> Tensor:
    """Return the codes of ``matrix`` [o, i] as [i, o] with contiguous columns, as cuBLAS needs."""
    return in_rows(matrix).codes.contiguous().t()
