"""Which linear layers run their collectives inside of their GEMMs (--tp-comm-overlap).

    column   all-gather of x [s/tp, b, i], then its GEMM
    row      GEMM of x [s, b, i/tp], then reduce-scatter; backward all-gathers the gradient

`linear.Overlap` does so, under sequence parallelism, for layers that multiply in 16 or 32 bits.
Layers in low precision keep separate collectives, which gather the 8-bit codes of inputs.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakSet

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


_NO_FUSED_GEMM = "layers in fp8 or fp4, or with adapters, have no fused GEMM"


def overlap_layers(
    model: nn.Module, group: ProcessGroup, config: ModelParallelConfig
) -> Overlapped:
    """Let the linear layers of ``model`` that have sequence parallelism overlap.

    Skips the output layer, whose GEMM is fused with the loss, and layers of Transformer Engine,
    whose quantizer is its own.  Collective over ``group``.
    """
    layers = []
    reasons: list[str] = []
    for layer in model.modules():
        if (
            not isinstance(layer, ColumnParallelLinear | RowParallelLinear)
            or not layer.sequence_parallel
        ):
            continue
        if layer.weight is None or info_of(layer.weight).is_embedding_or_output:
            continue
        if isinstance(layer.quantizer, LinearQuantizer | FrozenWeight | None):
            if layer.quantizer is None and layer.lora is None:
                layers.append(layer)
            else:
                reasons = [_NO_FUSED_GEMM]
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
