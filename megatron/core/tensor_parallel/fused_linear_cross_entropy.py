"""Output layer and cross entropy in one autograd function.

``t`` tokens, ``h`` hidden size, ``p`` this rank's rows of the padded vocabulary, ``x/tp`` one
rank's share of ``x``.  Collectives over the group: in forward an all-gather of the input (sequence
parallelism only), then one max and one sum all-reduce; in backward those of a column-parallel layer
(`linear.linear_backward`).

With chunks, the logits of only some tokens exist at a time.  Backward recomputes them, which costs
a fourth GEMM besides the usual three, and accumulates the weight gradient over chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.fusions.linear_cross_entropy import (
    VocabularyPart,
    gradient_from_sums,
    gradient_scale,
    loss_and_gradient,
    loss_and_sums,
)
from megatron.core.tensor_parallel.linear import LinearCall, linear_backward, start_reduction
from megatron.core.tensor_parallel.mappings import slice_of_first_dim
from megatron.core.tensor_parallel.weight_gradient import (
    WeightGrad,
    add_to_main_grad,
    adds_to_main_grad,
)


class _LinearCrossEntropy(Function[Tensor]):
    """All tokens at once: forward overwrites the logits with their gradient and saves it."""

    @staticmethod
    def forward(
        ctx: Context[LinearCall],
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        is_own: bool,
        sequence_parallel: bool,
        part: VocabularyPart,
    ) -> Tensor:
        group = part.group if part.group.size() > 1 else None
        ctx.values = call = LinearCall(weight, None, is_own, group, sequence_parallel)
        total_x = call.gathered(x)
        if not any(ctx.needs_input_grad):
            return loss_and_sums(total_x, weight, target, part)[0]
        logits = torch.mm(total_x, weight.t())
        loss = loss_and_gradient(logits, target, part)
        ctx.save_for_backward(x, weight, logits, target < 0)
        return loss

    @staticmethod
    def backward(ctx: Context[LinearCall], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, grad_logits, ignored = ctx.saved_tensors
        call = ctx.values
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # Each token's gradient has its own factor: apply it to the [t, h] matrices, which are
        # smaller than the [t, p] logits.
        grad = grad.masked_fill(ignored, 0) / gradient_scale(x.dtype)
        scale = grad.unsqueeze(-1).to(x.dtype)
        gather = call.gather_group
        own_scale = scale if gather is None else slice_of_first_dim(scale, gather)
        item = WeightGrad(
            call.weight if needs_weight else None,
            None,
            grad_logits,
            x * own_scale if needs_weight else x,
            group=gather,
            is_own=call.is_own,
        )

        def partial_grad_x() -> Tensor:
            return torch.mm(grad_logits, weight).mul_(scale)

        grad_x, grad_weight, _ = linear_backward(item, partial_grad_x if needs_x else None, call)
        return grad_x, grad_weight, None, None, None, None


class _InChunks(Function[Tensor]):
    """Chunks of tokens: forward saves the log-sum-exp of each token, backward recomputes logits."""

    @staticmethod
    def forward(
        ctx: Context[Any],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        is_own: bool,
        sequence_parallel: bool,
        chunk_size: int,
        part: VocabularyPart,
    ) -> Tensor:
        call = LinearCall(weight, bias, is_own, part.group, sequence_parallel)
        loss, log_sum = loss_and_sums(
            call.gathered(x), weight, target, part, bias=bias, rows_at_a_time=chunk_size
        )
        ctx.save_for_backward(x, weight, target, log_sum)
        ctx.values = call, part, chunk_size
        return loss

    @staticmethod
    def backward(ctx: Context[Any], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, target, log_sum = ctx.saved_tensors
        call, part, chunk_size = ctx.values
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        params = call.weight if needs_weight else None, call.bias if needs_bias else None
        total_x = call.gathered(x)
        grad_x = torch.empty_like(total_x) if ctx.needs_input_grad[0] else None
        grads: list[Tensor | None] = [None, None]
        main = params[0] if call.is_own and adds_to_main_grad(params[0]) else None
        # A 16-bit main gradient would be rounded after every chunk: sum in float32 instead.
        adds_chunks = main is not None and main.main_grad.itemsize > 2
        for i in range(0, total_x.shape[0], chunk_size):
            rows = slice(i, i + chunk_size)
            logits = F.linear(total_x[rows], weight, call.bias)
            gradient_from_sums(logits, target[rows], (log_sum[rows], grad[rows]), part)
            if grad_x is not None:
                torch.mm(logits, weight, out=grad_x[rows])
            item = WeightGrad(*params, logits, total_x[rows], group=None, is_own=adds_chunks)
            added = zip(grads, item.compute(), (adds_chunks, False), strict=True)
            grads = [_sum(*terms) for terms in added]
        if grad_x is not None and part.group.size() > 1:
            work, grad_x = start_reduction(grad_x, part.group, call.sequence_parallel)
            work.wait()
        if main is not None and not adds_chunks and grads[0] is not None:
            grads[0] = add_to_main_grad(main, grads[0])
        narrow = (None if g is None else g.to(weight.dtype) for g in grads)
        return grad_x, *narrow, *(None,) * 5


def _sum(total: Tensor | None, term: Tensor | None, is_elsewhere: bool) -> Tensor | None:
    """Add a chunk's gradient ``term`` to ``total`` in float32.

    ``is_elsewhere``: the term was added to the main gradient already.
    """
    if term is None or is_elsewhere:
        return term
    if total is None:
        return term.to(torch.promote_types(term.dtype, torch.float32))
    return total.add_(term)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: ProcessGroup,
    num_columns: int,
    sequence_parallel: bool = False,
    is_own: bool = False,
    bias: Tensor | None = None,
    cap: float | None = None,
    chunk_size: int = 0,
) -> Tensor:
    """Return the loss of each token [t] in float32 for x [t, h], weight [p, h] and target [t].

    ``weight`` is this rank's shard of the vocabulary; its first ``num_columns`` rows are not
    padding.  A negative target has loss 0 and no gradient.  With ``sequence_parallel``, x is
    [t/tp, h].  ``is_own``: nothing else uses the weight, so its gradient can be deferred; a queue
    then keeps the gradient of the logits, [t, p] in the compute dtype.  ``cap``: soft cap of the
    logits by tanh.  ``chunk_size``: number of tokens whose logits exist at a time, 0 for all.  With
    chunks, a ``bias`` [p] or a ``cap``, gradients are not deferred.

    Collective over ``group``, also in backward.
    """
    num_tokens = target.shape[0]
    part = VocabularyPart(group, num_columns, cap)
    if bias is None and cap is None and not 0 < chunk_size < num_tokens:
        return _LinearCrossEntropy.apply(x, weight, target, is_own, sequence_parallel, part)
    size = chunk_size or max(1, num_tokens)
    return _InChunks.apply(x, weight, bias, target, is_own, sequence_parallel, size, part)
