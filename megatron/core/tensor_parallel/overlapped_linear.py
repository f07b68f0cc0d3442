"""Linear layers whose GEMMs overlap with the collective that feeds or follows them.

With --tp-comm-overlap under sequence parallelism, these collectives run inside of the GEMM, as
`overlap` describes.  Other collectives of these layers overlap with other GEMMs, as in `linear`.

    column   all-gather of x [s/tp, b, i], then its GEMM
    row      GEMM of x [s, b, i/tp], then reduce-scatter; backward all-gathers the gradient

Collectives over the tensor-parallel group, in the order of `linear` and of the layers.
"""

from __future__ import annotations

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
from megatron.core.tensor_parallel.mappings import reduce_scatter_first_dim
from megatron.core.tensor_parallel.overlap import Overlap, scattering_backward
from megatron.core.tensor_parallel.overlapped_quantized_linear import (
    quantized_column_product,
    quantized_row_product,
)
from megatron.core.tensor_parallel.quantized_linear import LinearQuantizer
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


def overlap_layers(model: nn.Module, group: ProcessGroup, config: OverlapConfig) -> str | None:
    """Let the linear layers of ``model`` overlap; return why they cannot, or None.

    Layers of Transformer Engine or with adapters, and layers in a low precision that `_can_overlap`
    excludes, keep their own GEMMs.  Collective over ``group``.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and _can_overlap(layer)
    ]
    if not layers:
        return "no layer has sequence parallelism and GEMMs of this program in 8, 16 or 32 bits"
    if reason := _why_no_symmetric_memory(group):
        return reason
    overlap = Overlap(
        group,
        gathers=config.tp_comm_overlap_ag and config.tp_comm_split_ag,
        scatters=config.tp_comm_overlap_rs and config.tp_comm_split_rs,
        scatters_gradients=config.tp_comm_overlap_rs_dgrad,
    )
    for layer in layers:
        is_column = isinstance(layer, ColumnParallelLinear)
        scatters = overlap.scatters_gradients if is_column else overlap.scatters
        if not (overlap.gathers or scatters):
            continue
        if isinstance(layer.quantizer, LinearQuantizer):
            run = quantized_column_product if is_column else quantized_row_product
            layer.overlapped = partial(run, overlap, layer.quantizer)
        else:
            layer.overlapped = partial(column_product if is_column else row_product, overlap)
    return None


def _can_overlap(layer: ColumnParallelLinear | RowParallelLinear) -> bool:
    """Return whether the layer has a GEMM that torch can fuse: in fp8 only with tensor scales."""
    is_plain = layer.multiply is F.linear and layer.lora is None
    if not layer.sequence_parallel or not is_plain:
        return False
    if not isinstance(layer.quantizer, LinearQuantizer):
        return layer.quantizer is None
    return layer.quantizer.recipe.block is None and device.multiplies_fp8(device.current())


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
        return *scattering_backward(item, lambda: overlap.scattered_product(grad, weight)), None


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
