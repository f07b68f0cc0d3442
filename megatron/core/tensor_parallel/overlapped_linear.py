"""Linear layers whose GEMMs overlap with the collective that feeds or follows them.

With --tp-comm-overlap under sequence parallelism, torch divides the GEMM of a layer by ranks: while
one part is computed, the next is copied through symmetric memory, which the GPUs of a group map
into each other's address space.  Other collectives of these layers overlap with other GEMMs, as in
`linear`.

    column   all-gather of x [s/tp, b, i], then its GEMM
    row      GEMM of x [s, b, i/tp], then reduce-scatter; backward all-gathers the gradient

Collectives over the tensor-parallel group, in the order of `linear` and of the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.autograd import Context, Function
from megatron.core.optional import require
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.linear import LinearCall, linear_backward
from megatron.core.tensor_parallel.mappings import all_gather_first_dim, reduce_scatter_first_dim
from megatron.core.tensor_parallel.weight_gradient import WeightGrad, is_deferred


class OverlapConfig(Protocol):
    """The fields of --tp-comm-overlap and its sub-flags that are read here."""

    @property
    def tp_comm_overlap_ag(self) -> bool: ...
    @property
    def tp_comm_split_ag(self) -> bool: ...
    @property
    def tp_comm_overlap_rs(self) -> bool: ...
    @property
    def tp_comm_split_rs(self) -> bool: ...
    @property
    def tp_comm_overlap_rs_dgrad(self) -> bool: ...


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


def overlap_layers(model: nn.Module, group: ProcessGroup, config: OverlapConfig) -> str | None:
    """Let the linear layers of ``model`` overlap; return why they cannot, or None.

    Layers in low precision or of Transformer Engine keep their own GEMMs.  Collective over
    ``group``.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear)
        and layer.sequence_parallel
        and layer.quantizer is None
        and layer.multiply is F.linear
    ]
    if not layers:
        return "no layer has sequence parallelism and GEMMs of this program in 16 or 32 bits"
    if reason := _why_no_symmetric_memory(group):
        return reason
    overlap = Overlap(
        group,
        gathers=config.tp_comm_overlap_ag and config.tp_comm_split_ag,
        scatters=config.tp_comm_overlap_rs and config.tp_comm_split_rs,
        scatters_gradients=config.tp_comm_overlap_rs_dgrad,
    )
    for layer in layers:
        if isinstance(layer, ColumnParallelLinear):
            if overlap.gathers or overlap.scatters_gradients:
                layer.overlapped = partial(column_product, overlap)
        elif overlap.gathers or overlap.scatters:
            layer.overlapped = partial(row_product, overlap)
    return None


def _why_no_symmetric_memory(group: ProcessGroup) -> str | None:
    """Return why the ranks of ``group`` cannot map each other's memory; None if they can.

    Collective over ``group``: the result is the same on all ranks.
    """
    reason = None
    if not device.launches_kernels(device.current()):
        reason = "it needs a GPU"
    else:
        symmetric_memory = require("torch.distributed._symmetric_memory", "--tp-comm-overlap")
        try:
            symmetric_memory.enable_symm_mem_for_group(group.group_name)
            symmetric_memory.get_symm_mem_workspace(group.group_name, 1)
        except RuntimeError as error:  # another node, or GPUs without access to each other
            reason = f"no symmetric memory: {str(error).splitlines()[0]}"
    works = torch.tensor(reason is None, dtype=torch.int32, device=device.current())
    dist.all_reduce(works, op=dist.ReduceOp.MIN, group=group)
    return None if works.item() else reason or "another rank has no symmetric memory"


def column_product(overlap: Overlap, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b of a column-parallel layer: [s/tp, b, i] -> [s, b, o/tp]."""
    return _ColumnProduct.apply(x, weight, bias, overlap)


def row_product(overlap: Overlap, x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T of a row-parallel layer, summed over ranks: [s, b, i/tp] -> [s/tp, b, o]."""
    return _RowProduct.apply(x, weight, overlap)


class _ColumnProduct(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[tuple[LinearCall, Overlap]],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        overlap: Overlap,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.values = LinearCall(weight, bias, True, overlap.group, True), overlap
        _, y = overlap.gathered_product(x, weight.t())
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(
        ctx: Context[tuple[LinearCall, Overlap]], grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        call, overlap = ctx.values
        weight_param, bias = call.params(ctx.needs_input_grad)
        item = WeightGrad(weight_param, bias, grad, x, group=overlap.group, is_own=True)
        needs_grad_x = ctx.needs_input_grad[0]
        if not overlap.scatters_gradients or not needs_grad_x:
            product = (lambda: grad.matmul(weight)) if needs_grad_x else None
            return *linear_backward(item, product, call), None
        is_later = is_deferred(item)
        if not is_later:
            item.start()
        grad_x = overlap.scattered_product(grad, weight)
        return grad_x, *((None, None) if is_later else item.compute()), None


class _RowProduct(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[tuple[Tensor, Overlap]], x: Tensor, weight: Tensor, overlap: Overlap
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.values = weight, overlap  # the parameter object, which a queue and main_grad need
        if overlap.scatters:
            return overlap.scattered_product(x, weight.t())
        return reduce_scatter_first_dim(x.matmul(weight.t()), overlap.group)

    @staticmethod
    def backward(
        ctx: Context[tuple[Tensor, Overlap]], grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        param, overlap = ctx.values
        grad, grad_x = overlap.gathered_product(grad, weight)
        wanted = param if ctx.needs_input_grad[1] else None
        item = WeightGrad(wanted, None, grad, x, group=None, is_own=True)
        return grad_x, None if is_deferred(item) else item.compute()[0], None
