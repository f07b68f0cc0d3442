"""What is summed after the last micro-batch, before the optimizer sees the gradients.

Order of collectives: the buckets over data-parallel ranks; then the gradients that are partial on
each tensor-parallel rank, over tp, one collective per dtype; then those of parameters that several
stages hold (embd, pos_embd, stack); then, for a loss per token, the number of tokens over pp and
over dp_cp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of, local_part


def finalize_model_grads(
    model: Sequence[DataParallelBase],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Make the gradients of all chunks those of the whole global batch.  Collective, all ranks.

    ``num_tokens`` (this rank's loss-bearing tokens; 0 where the loss is not) is given when losses
    are sums over tokens: gradients are divided by the total.
    """
    groups = pg_collection or model[0].groups
    for chunk in model:
        chunk.finish_grad_sync()
    sum_partial_gradients(model, groups)
    sum_tied_gradients(model, groups)
    if num_tokens is not None:
        total = total_tokens(num_tokens, groups)
        for chunk in model:
            chunk.scale_gradients(1.0 / total.clamp(min=1))


def sum_partial_gradients(
    model: Sequence[DataParallelBase], groups: ProcessGroupCollection
) -> None:
    """Sum over tp what each tensor-parallel rank has computed from its part of the sequence.

    Collective over tp, whose ranks own the same parts of sharded parameters.
    """
    if groups.tp.size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for chunk in model:
        for param, grad in chunk.reduced_gradients():
            if info_of(param).sequence_parallel:
                # A rank must not skip a collective because it had nothing to compute.
                if grad is None:
                    param.grad = torch.zeros_like(param)
                    grad = local_part(param.grad)
                by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=groups.tp)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])


def sum_tied_gradients(model: Sequence[DataParallelBase], groups: ProcessGroupCollection) -> None:
    """Give all copies of a parameter that several stages hold the sum of their gradients.

    Collective over the group that each such parameter names, unless several copies lie on this
    rank: then all of them do.  Of a sharded copy a rank owns the same part on every stage: it has a
    bucket of its own, or is cut by rows over as many replicas.
    """
    copies: dict[tuple[str, str], dict[nn.Parameter, Tensor]] = {}
    for chunk in model:
        for param, grad in chunk.reduced_gradients():
            info = info_of(param)
            if info.shared_over is not None:
                if grad is None:
                    param.grad = torch.zeros_like(param)
                    grad = local_part(param.grad)
                # All stages come to the groups in this order.
                copies.setdefault((info.shared_over, info.name), {})[param] = grad
    for (name, _), held in sorted(copies.items(), key=lambda item: item[0]):
        first, *others = held.values()
        for other in others:
            first.add_(other)
        for other in others:
            other.copy_(first)
        group = getattr(groups, name)
        if not others and group.size() > 1:
            dist.all_reduce(first, group=group)


def total_tokens(num_tokens: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Tokens of the global batch.  Collective over pp and dp_cp."""
    total = num_tokens.detach().clone()
    for group in (groups.pp, groups.dp_cp):
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total
