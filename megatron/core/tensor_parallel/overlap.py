"""Which linear layers run their collectives inside of their GEMMs (--tp-comm-overlap).

    column   all-gather of x [s/tp, b, i], then its GEMM
    row      GEMM of x [s, b, i/tp], then reduce-scatter; backward all-gathers the gradient

`linear.Overlap` does so, under sequence parallelism.  In fp8 with one scale per tensor, the codes
are gathered; recipes with blocks keep separate collectives: torch's fused operations take one scale
per tensor or per row (docs/log.md).  A row-parallel layer then gathers the codes of its output
gradient instead of 16-bit values; their scale has to be the same on all ranks, so current scaling
reduces the amax of the gradient first.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakSet

import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optional import require
from megatron.core.parallel.collectives import is_so_everywhere
from megatron.core.params.param_info import info_of
from megatron.core.rank_local import each_rank_owns
from megatron.core.tensor_parallel.frozen_weight import FrozenWeight
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.linear import Overlap
from megatron.core.tensor_parallel.quantized_linear import LinearQuantizer

_mapped: WeakSet[ProcessGroup] = WeakSet()  # groups whose ranks map each other's memory
each_rank_owns(__name__, "_mapped")


class Overlapped(NamedTuple):
    """What `overlap_layers` did: the number of layers that overlap, and why others do not."""

    num_layers: int
    reasons: list[str]


_Sharded = ColumnParallelLinear | RowParallelLinear


def overlap_layers(
    model: nn.Module, group: ProcessGroup, config: ModelParallelConfig
) -> Overlapped:
    """Let the linear layers of ``model`` that have sequence parallelism overlap.

    Skips the output layer, whose GEMM is fused with the loss, and layers of Transformer Engine,
    whose quantizer is its own.  Collective over ``group``.
    """
    layers = []
    reasons = []
    for layer in model.modules():
        if not isinstance(layer, _Sharded) or not layer.sequence_parallel:
            continue
        if layer.weight is None or info_of(layer.weight).is_embedding_or_output:
            continue
        if isinstance(layer.quantizer, LinearQuantizer | FrozenWeight | None):
            reason = _unsupported_reason(layer)
            if reason is None:
                layers.append(layer)
            elif reason not in reasons:
                reasons.append(reason)
    if not layers:
        return Overlapped(0, reasons or ["no layer of this program has sequence parallelism"])
    if without_memory := _why_no_symmetric_memory(group):
        return Overlapped(0, [*reasons, without_memory])
    overlap = Overlap(
        group,
        gathers=config.tp_comm_overlap_ag and config.tp_comm_split_ag,
        scatters=config.tp_comm_overlap_rs and config.tp_comm_split_rs,
        scatters_gradients=config.tp_comm_overlap_rs_dgrad,
    )
    for layer in layers:
        is_column = isinstance(layer, ColumnParallelLinear)
        scatters = overlap.scatters_gradients if is_column else overlap.scatters
        if overlap.gathers or scatters:
            layer.overlap = overlap
    return Overlapped(len(layers), reasons)


def _unsupported_reason(layer: _Sharded) -> str | None:
    """Return why torch cannot fuse the layer's GEMM with a collective; None if it can.

    torch's operations (2.11 and 2.13) call ``_scaled_mm`` with a slice of the scales of the input:
    one scale for all slices, or one scale per row.
    """
    if layer.multiply is not F.linear:
        return "layers with a GEMM of their own have no fused one"
    if layer.lora is not None:
        return "layers with adapters have no fused GEMM"
    if isinstance(layer.quantizer, FrozenWeight):
        return "layers with frozen weights in low precision have no fused GEMM"
    if not isinstance(layer.quantizer, LinearQuantizer):
        return None
    recipe = layer.quantizer.recipe
    if recipe.block is not None:
        name = "fp4" if recipe.is_fp4 else "fp8"
        return (
            f"torch's fused GEMMs take one {name} scale per tensor or row, not one for each "
            f"{recipe.block} values of a row: use --fp8-recipe tensorwise or delayed"
        )
    if not device.multiplies_fp8(device.current()):
        return "this device has no GEMMs in fp8"
    assert layer.weight is not None, "checked by the caller"
    shape = tuple(layer.weight.shape)
    if any(n % 16 for n in shape):  # `low_precision.scaled_mm` pads, torch's operations do not
        limit = "fused fp8 GEMMs need multiples of 16 in a rank's part of a weight"
        return f"{limit}, which has {shape}"
    return None


def _why_no_symmetric_memory(group: ProcessGroup) -> str | None:
    """Return why the ranks of ``group`` cannot map each other's memory; None if they can.

    Collective over ``group``: the result is the same on all ranks.
    """
    if not device.launches_kernels(device.current()):
        return "it needs a GPU"
    symmetric_memory = require("torch.distributed._symmetric_memory", "--tp-comm-overlap")
    name = group.group_name
    # torch keeps the memory of a destroyed group under its name, which groups of a later run of the
    # process get again.  All ranks ask first: a rank that maps memory waits for the others.
    is_free = group in _mapped or not symmetric_memory.is_symm_mem_enabled_for_group(name)
    if not is_so_everywhere(is_free, group):
        return "an earlier run of this process has used symmetric memory: start new processes"
    _mapped.add(group)
    reason = None
    try:
        symmetric_memory.enable_symm_mem_for_group(name)
        symmetric_memory.get_symm_mem_workspace(name, 1)
    except RuntimeError as error:  # another node, or GPUs without access to each other
        reason = f"no symmetric memory: {str(error).splitlines()[0]}"
    if is_so_everywhere(reason is None, group):
        return None
    return reason or "another rank has no symmetric memory"
