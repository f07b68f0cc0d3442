"""Cross entropy over logits whose vocabulary is sharded over tensor-parallel ranks.

``v`` true vocabulary size, ``p`` padded size; a rank holds p/tp columns.  Padding columns are not
part of the softmax, so the loss does not depend on the padding that a layout needs.  Collectives
over the group in forward: one max and one sum all-reduce, in `kl_divergence` two more.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.config.errors import DataError
from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.parallel.default_groups import library_call
from megatron.core.tensor_parallel.layers import check_token_ids


def true_columns(local_columns: int, vocab_size: int | None, group: ProcessGroup) -> int:
    """Return the number of this rank's columns that are not padding.

    ``vocab_size`` is the true size; None means that there is no padding.
    """
    if vocab_size is None:
        return local_columns
    return min(max(vocab_size - group.rank() * local_columns, 0), local_columns)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _VocabParallelCrossEntropy(Function[Tensor]):
    """Saves the logits in their own dtype and recomputes the softmax in backward."""

    @staticmethod
    def forward(
        ctx: Context[tuple[int, float, int]],
        logits: Tensor,
        target: Tensor,
        label_smoothing: float,
        group: ProcessGroup,
        vocab_size: int | None,
    ) -> Tensor:
        columns = true_columns(logits.shape[-1], vocab_size, group)
        true_logits = at_least_float32(logits[..., :columns])
        total_columns = vocab_size or logits.shape[-1] * group.size()
        index = target - group.rank() * logits.shape[-1]
        is_mine = (index >= 0) & (index < columns)
        index = index.masked_fill(~is_mine, 0)  # 0 where another rank has the column

        if columns:
            highest = true_logits.amax(-1)
        else:  # this rank holds padding only
            highest = true_logits.new_full(target.shape, -torch.inf)
        all_reduce_over(highest, group, op=dist.ReduceOp.MAX)
        shifted = true_logits - highest.unsqueeze(-1)
        at_target = torch.zeros_like(highest)
        if columns:
            at_target = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~is_mine, 0)
        terms = [shifted.exp().sum(-1), at_target]
        if label_smoothing:
            terms.append(shifted.sum(-1))
        sums = all_reduce_over(torch.stack(terms), group)
        log_sum = sums[0].log()
        loss = log_sum - sums[1]
        if label_smoothing:
            loss = (1 - label_smoothing) * loss
            loss += label_smoothing * (log_sum - sums[2] / total_columns)
        is_ignored = target < 0
        ctx.save_for_backward(logits, highest + log_sum, index, is_mine, is_ignored)
        ctx.values = columns, label_smoothing, total_columns
        return loss.masked_fill(is_ignored, 0)

    @staticmethod
    def backward(ctx: Context[tuple[int, float, int]], grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum_exp, index, is_mine, is_ignored = ctx.saved_tensors
        columns, smoothing, total_columns = ctx.values
        grad = grad.masked_fill(is_ignored, 0).unsqueeze(-1)
        share = at_least_float32(logits[..., :columns]) - log_sum_exp.unsqueeze(-1)
        share.exp_()
        if columns:
            minus_target = -(1 - smoothing) * is_mine.to(share.dtype)
            share.scatter_add_(-1, index.unsqueeze(-1), minus_target.unsqueeze(-1))
        if smoothing:
            share -= smoothing / total_columns
        share *= grad
        if columns == logits.shape[-1]:
            return share.to(logits.dtype), None, None, None, None
        grad_logits = torch.zeros_like(logits)
        grad_logits[..., :columns] = share
        return grad_logits, None, None, None, None


@library_call("vocab_parallel_logits target label_smoothing tp_group")
def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    tp_group: ProcessGroup,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the loss of each token in float32: logits [..., p/tp], target [...] -> [...].

    ``vocab_size``: true size if the logits have padding columns.  ``label_smoothing``: probability
    that is divided over the other tokens than the target.  A negative target has loss 0 and no
    gradient.  Collective over ``tp_group`` in forward.  Raises DataError for targets that do not
    fit the logits or the vocabulary (on a GPU a device-side assertion for the vocabulary).
    """
    shape = vocab_parallel_logits.shape
    if target.shape != shape[:-1] or target.is_floating_point():
        raise DataError(
            f"targets {list(target.shape)} of {target.dtype} do not fit logits {list(shape)}: pass "
            "one token id (an integer) for each row of logits"
        )
    limit = vocab_size or shape[-1] * tp_group.size()
    check_token_ids(target, limit, may_ignore=True)
    # `_VocabParallelCrossEntropy` divides over all tokens, with the target.
    smoothing = label_smoothing * limit / (limit - 1) if label_smoothing else 0.0
    return _VocabParallelCrossEntropy.apply(
        vocab_parallel_logits, target, smoothing, tp_group, vocab_size
    )


def kl_divergence(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    *,
    tp_group: ProcessGroup,
    vocab_size: int | None = None,
) -> Tensor:
    """Return KL(teacher || student) of each token: two logits [..., p/tp] -> [...].

    Both softmaxes have ``temperature``; the result is not multiplied by its square.  Only the
    student's logits have a gradient.  ``vocab_size``: true size if the logits have padding columns,
    which take no part.  Collective over ``tp_group`` in forward.
    """
    return _KLDivergence.apply(student, teacher.detach(), temperature, tp_group, vocab_size)


class _KLDivergence(Function[Tensor]):
    """Saves the gradient of the logits: nothing else is needed in backward."""

    @staticmethod
    def forward(
        ctx: Context[int],
        student: Tensor,
        teacher: Tensor,
        temperature: float,
        group: ProcessGroup,
        vocab_size: int | None,
    ) -> Tensor:
        columns = true_columns(student.shape[-1], vocab_size, group)
        both = torch.stack([at_least_float32(x[..., :columns]) for x in (student, teacher)])
        both /= temperature
        log_q, log_p = both - log_sum_exp(both, group).unsqueeze(-1)
        p = log_p.exp()
        loss = all_reduce_over((p * (log_p - log_q)).sum(-1), group)
        gradient = torch.zeros_like(student)
        gradient[..., :columns] = (log_q.exp_() - p) / temperature
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Context[int], grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (grad.unsqueeze(-1) * gradient).to(gradient.dtype), None, None, None, None


def log_sum_exp(logits: Tensor, group: ProcessGroup) -> Tensor:
    """Return the logarithm of the sum of exponentials over the vocabulary: [..., c] -> [...].

    ``c`` true columns of this rank, perhaps 0.  No gradient.  Collective over ``group``.
    """
    shape = logits.shape[:-1]
    highest = logits.amax(-1) if logits.shape[-1] else logits.new_full(shape, float("-inf"))
    all_reduce_over(highest, group, op=dist.ReduceOp.MAX)
    total = (logits - highest.unsqueeze(-1)).exp().sum(-1)
    return highest + all_reduce_over(total, group).log()
