"""The output layer and the loss of each token in one step.

``t`` tokens, ``h`` width, ``p`` this rank's rows of the padded vocabulary, ``x/tp`` a share of
``x``.  Collectives over the group: under sequence parallelism an all-gather of the input, one max
and one sum forward; backward those of a column layer (`linear.linear_backward`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.fusions.linear_cross_entropy import (
    gradient_scale,
    loss_alone,
    loss_and_gradient,
)
from megatron.core.tensor_parallel.linear import linear_backward
from megatron.core.tensor_parallel.mappings import all_gather_first_dim, slice_of_first_dim
from megatron.core.tensor_parallel.weight_gradient import WeightGrad


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        is_own: bool,
        group: ProcessGroup,
        sequence_parallel: bool,
        num_columns: int,
    ) -> Tensor:
        total_x = all_gather_first_dim(x, group) if sequence_parallel else x
        where: Any = {"group": group, "num_columns": num_columns}
        if not any(ctx.needs_input_grad):
            return loss_alone(total_x, weight, target, **where)
        logits = torch.mm(total_x, weight.t())
        loss = loss_and_gradient(logits, target, **where)
        ctx.save_for_backward(x, weight, logits, target < 0)
        ctx.param = weight  # itself, for a queue and for main_grad
        ctx.is_own, ctx.group, ctx.sequence_parallel = is_own, group, sequence_parallel
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, grad_logits, ignored = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # Tokens weigh differently: scale rows of the narrow matrices, not of the wide one.
        grad = grad.masked_fill(ignored, 0) / gradient_scale(x.dtype)
        scale = grad.unsqueeze(-1).to(x.dtype)
        own_scale = slice_of_first_dim(scale, ctx.group) if ctx.sequence_parallel else scale
        item = WeightGrad(
            ctx.param if needs_weight else None,
            None,
            grad_logits,
            x * own_scale if needs_weight else x,
            group=ctx.group if ctx.sequence_parallel else None,
            is_own=ctx.is_own,
        )

        def partial_grad_x() -> Tensor:
            return torch.mm(grad_logits, weight).mul_(scale)

        grad_x, grad_weight, _ = linear_backward(
            item,
            partial_grad_x if needs_x else None,
            ctx.group if ctx.group.size() > 1 else None,
            sequence_parallel=ctx.sequence_parallel,
        )
        return grad_x, grad_weight, None, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup,
    num_columns: int,
    sequence_parallel: bool = False,
    is_own: bool = False,
) -> Tensor:
    """[t, h], [p, h], [t] -> loss of each token [t] in float32; a negative target costs nothing.

    ``weight`` is this rank's share of the vocabulary, ``num_columns`` of its rows are true.  Under
    ``sequence_parallel`` x is this rank's rows [t/tp, h].  Where nothing else uses the weight
    (``is_own``) its gradient can be deferred: a queue then keeps the gradient of the logits,
    [t, p] in the compute dtype.
    """
    return _LinearCrossEntropy.apply(
        x, weight, target, is_own, group, sequence_parallel, num_columns
    )
