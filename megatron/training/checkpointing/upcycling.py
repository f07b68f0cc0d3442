"""Initialize experts from the MLPs of a dense checkpoint (--moe-use-upcycling).

With --moe-upcycling-granularity G, expert ``n`` is part ``n mod G`` of the dense MLP's inner
dimension, and the router gives the G parts of an MLP equal scores, so a token selects all of them
or none.  The outputs of its experts then add up to that of the dense MLP, and the first logits are
those of the dense model.  Shared experts add zero at first: their second matrix is zero.  Routers
start from random weights.

Source: arXiv 2410.07524 (parts, and routers that score them equally).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from megatron.core.dist_checkpointing.records import TensorRecord, split
from megatron.core.params.param_info import info_of, local_part
from megatron.core.transformer.transformer_config import TransformerConfig

_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_NEW = re.compile(r"\.mlp\.(router|shared_experts)\.")


def as_dense(
    tensors: Iterable[TensorRecord], config: TransformerConfig, granularity: int
) -> Iterator[TensorRecord]:
    """Yield records that load tensors of a dense model into the memory of ``tensors``.

    Routers and shared experts get no record: the dense model has none.
    """
    for tensor in tensors:
        found = _EXPERT.search(tensor.key)
        if found:
            tensor = replace(tensor, key=tensor.key.replace(found.group(), "."))
            part = int(found.group(1)) % granularity
            yield _part_of_mlp(tensor, config, part, granularity) if granularity > 1 else tensor
        elif not _NEW.search(tensor.key):
            yield tensor


def _part_of_mlp(
    tensor: TensorRecord, config: TransformerConfig, part: int, granularity: int
) -> TensorRecord:
    """Return the record of an expert's tensor as one part of the dense MLP's inner dimension."""
    if tensor.key.endswith("linear_fc2.bias"):
        return tensor
    is_first = "linear_fc1" in tensor.key
    dim, num_blocks = 0 if is_first else 1, 1 + (is_first and config.gated_linear_unit)
    share = tensor.global_shape[dim] // num_blocks  # an expert's width in the gate or up half
    pieces = []
    for block, own in enumerate(split(tensor, [share] * num_blocks, dim)):
        for piece in own.pieces:
            offset = list(piece.offset)
            offset[dim] += share * (block * granularity + part)
            pieces.append(replace(piece, offset=tuple(offset)))
    shape = list(tensor.global_shape)
    shape[dim] *= granularity
    return replace(tensor, global_shape=tuple(shape), pieces=tuple(pieces))


@torch.no_grad()
def finish_upcycling(
    chunks: Iterable[nn.Module], config: TransformerConfig, granularity: int
) -> None:
    """Adapt the loaded weights so that the first logits are those of the dense model."""
    scaling = config.moe_router_topk_scaling_factor or 1.0
    for param in (p for chunk in chunks for p in chunk.parameters()):
        name, held = info_of(param).name, local_part(param)
        if _EXPERT.search(name) and ".linear_fc2." in name:
            held *= (granularity if name.endswith("weight") else 1) / scaling
        elif ".shared_experts.linear_fc2." in name:
            held.zero_()
        elif name.endswith(".mlp.router.weight") and granularity > 1:
            held.copy_(held[::granularity].repeat_interleave(granularity, dim=0))
