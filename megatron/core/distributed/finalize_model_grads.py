"""Finish the gradients after the last micro-batch, before the optimizer step.

Order of collectives: reduce the buckets over data-parallel ranks; all-reduce over tp the gradients
that are partial on each tensor-parallel rank (sequence parallelism), and those of parameters with
Megatron Core's attribute ``average_gradients_across_tp_domain``, one collective per dtype;
all-reduce the gradients of parameters that several stages hold (groups embd, pos_embd, stack); for
a loss per token, all-reduce the number of tokens over pp and then over dp_cp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, info_of, local_part


def finalize_model_grads(
    model: Sequence[DataParallelBase],
    num_tokens: Tensor | None = None,
    grad_finalize_pgs: ProcessGroupCollection | None = None,
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Reduce the gradients of all chunks to those of the global batch.  Collective on all ranks.

    ``num_tokens``: number of loss-bearing tokens of this rank (0 on stages without the loss), if
    losses are sums over tokens; gradients are then divided by the global number.
    Modules with a static method ``end_batch(model, groups)`` then update the buffers that they
    derive from the batch, such as the biases of MoE routers.
    ``grad_finalize_pgs``: an earlier name of ``pg_collection``.  Default: the groups of the model.
    """
    groups = pg_collection or grad_finalize_pgs or model[0].groups
    reduce_model_grads(model, num_tokens, groups)
    ends = (getattr(m, "end_batch", None) for chunk in model for m in chunk.modules())
    for end_batch in dict.fromkeys(filter(None, ends)):
        end_batch(model, groups)


def reduce_model_grads(
    model: Sequence[DataParallelBase], num_tokens: Tensor | None, groups: ProcessGroupCollection
) -> None:
    """Do what `finalize_model_grads` does, but leave the buffers of modules as they are."""
    for chunk in model:
        chunk.finish_grad_sync()
    for group, is_expert in ((groups.tp, False), (groups.expt_tp, True)):
        if group.size() > 1:
            _sum_partial_gradients(model, group, is_expert)
    sum_tied_gradients(model, groups)
    if num_tokens is not None:
        total = total_tokens(num_tokens, groups)
        for chunk in model:
            chunk.scale_gradients(1.0 / total.clamp(min=1))


def _used_gradients(
    model: Sequence[DataParallelBase], is_summed: Callable[[nn.Parameter, ParamInfo], bool]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the parameters whose gradients are summed, and the gradients.

    Every rank must join the collective, also with a parameter it has not used: zeros.
    """
    for chunk in model:
        for param, grad in chunk.reduced_gradients():
            if is_summed(param, info_of(param)):
                if grad is None:
                    param.grad = torch.zeros_like(param)
                    grad = local_part(param.grad)
                yield param, grad


def _sum_partial_gradients(
    model: Sequence[DataParallelBase], group: dist.ProcessGroup, is_expert: bool
) -> None:
    """Sum gradients over tp that are partial on each rank, as of its part of the sequence.

    A gradient that tp ranks are to average is divided by their number before.  Collective over tp,
    whose ranks own the same parts of parameters that the distributed optimizer or FSDP shards; for
    adapters of experts over expt_tp.
    """

    def is_summed(param: nn.Parameter, info: ParamInfo) -> bool:
        return info.is_expert == is_expert and (info.sequence_parallel or _is_averaged(param))

    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for param, grad in _used_gradients(model, is_summed):
        if _is_averaged(param):
            grad.div_(group.size())
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [p.view_as(g) for p, g in zip(parts, grads, strict=True)])


def _is_averaged(param: nn.Parameter) -> bool:
    """Return whether a project has asked to average the gradient over tensor-parallel ranks."""
    return bool(vars(param).get("average_gradients_across_tp_domain"))


def sum_tied_gradients(model: Sequence[DataParallelBase], groups: ProcessGroupCollection) -> None:
    """Sum the gradients of all copies of a parameter that several pipeline stages hold.

    Collective over the group ``info.shared_over`` of each such parameter.  If this rank holds
    several copies, it holds all of them, and no collective is needed.  A rank owns the same part of
    a sharded copy on every stage: the copy has a bucket of its own (distributed optimizer), or its
    rows are split over equally many ranks (FSDP).
    """
    copies: dict[tuple[str, str], dict[nn.Parameter, Tensor]] = {}
    for param, grad in _used_gradients(model, lambda _, info: info.shared_over is not None):
        # Sorting these keys gives the collectives the same order on all stages.
        copies.setdefault((str(info_of(param).shared_over), info_of(param).name), {})[param] = grad
    for (name, _), held in sorted(copies.items(), key=lambda item: item[0]):
        first, *others = held.values()
        for other in others:
            first.add_(other)
        for other in others:
            other.copy_(first)
        if not others:
            all_reduce_over(first, getattr(groups, name))


def total_tokens(num_tokens: Tensor, groups: ProcessGroupCollection) -> Tensor:
    """Return the number of tokens of the global batch.  Collective over pp and dp_cp."""
    return all_reduce_over(num_tokens.detach().clone(), groups.pp, groups.dp_cp)
