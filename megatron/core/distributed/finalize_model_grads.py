"""What is summed after the last micro-batch, before the optimizer sees the gradients.

Order of collectives: the buckets over data-parallel ranks; then the gradients that are partial on
each tensor-parallel rank, over tp, one collective per dtype; then, for a loss per token, the
number of tokens: from the last stage over pp, and summed over dp_cp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.grad_buffer import gradient_of
from megatron.core.param_info import info_of
from megatron.core.process_groups_config import ProcessGroupCollection


def finalize_model_grads(
    model: Sequence[DistributedDataParallel],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Make the gradients of all chunks those of the whole global batch.  Collective, all ranks.

    ``num_tokens`` (this rank's loss-bearing tokens; what the other stages pass is ignored) is
    given when losses are sums over tokens: gradients are divided by the total.
    """
    groups = pg_collection or model[0].groups
    for chunk in model:
        chunk.finish_grad_sync()
    sum_partial_gradients(model, groups)
    if num_tokens is not None:
        total = total_tokens(num_tokens, groups)
        for chunk in model:
            chunk.scale_gradients(1.0 / total.clamp(min=1))


def sum_partial_gradients(
    model: Sequence[DistributedDataParallel], groups: ProcessGroupCollection
) -> None:
    """Sum over tp what each tensor-parallel rank has computed from its part of the sequence.

    Collective over tp.
    """
    if groups.tp.size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for chunk in model:
        for param in chunk.parameters():
            if param.requires_grad and info_of(param).sequence_parallel:
                grad = gradient_of(param)
                # A rank must not skip a collective because it had nothing to compute.
                if grad is None:
                    grad = param.grad = torch.zeros_like(param)
                by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=groups.tp)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])


def total_tokens(num_tokens: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Tokens of the global batch from the last stage's counts.  Collective over pp and dp_cp."""
    total = num_tokens.detach().clone()
    if groups.pp.size() > 1:
        last = dist.get_global_rank(groups.pp, groups.pp.size() - 1)
        dist.broadcast(total, last, group=groups.pp)
    if groups.dp_cp.size() > 1:
        dist.all_reduce(total, group=groups.dp_cp)
    return total
