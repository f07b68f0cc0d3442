"""Softmax minus one-hot, written over logits [t, p] row by row, so that a row stays in the cache.

``columns`` of the p are in the vocabulary.  A target is a global id; ``first`` is the id of the
first column of this rank.  A token with a negative target has loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.device import cpu_kernels


def loss_and_gradient(logits: Tensor, target: Tensor, columns: int, scale: float) -> Tensor:
    """Return the loss of each token; ``logits`` become (softmax - onehot) * scale."""
    loss = _numbers_of_rows(logits)
    _run("cross_entropy", logits, [target, loss], (columns, 0), scale)
    return loss


def own_sums(logits: Tensor, target: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row and the target's logit (or 0), in one read."""
    log_sum, at_target = _numbers_of_rows(logits), _numbers_of_rows(logits)
    _run("own_sums", logits, [target, log_sum, at_target], (columns, first))
    return log_sum, at_target


def turn(
    logits: Tensor, target: Tensor, log_sum: Tensor, first: int, columns: int, scale: float | Tensor
) -> None:
    """Overwrite ``logits`` with (softmax - onehot) * scale; ``scale`` is a scalar or [t]."""
    scales = scale.float().contiguous() if isinstance(scale, Tensor) else None
    of_all = 1.0 if isinstance(scale, Tensor) else scale
    beside = [target, log_sum.contiguous(), scales]
    _run("gradients_of_log_sums", logits, beside, (columns, first), of_all)


def _numbers_of_rows(logits: Tensor) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)


def _run(
    kernel: str,
    logits: Tensor,
    beside: list[Tensor | None],
    where: tuple[int, int],
    scale: float = 1.0,
) -> None:
    """Run a kernel over the rows; ``beside`` are its arguments, the target first."""
    assert beside[0] is not None, "rows have targets"
    beside[0] = beside[0].long().contiguous()
    cpu_kernels.run(
        kernel,
        [logits, *beside],
        format=logits.dtype,
        sizes=(logits.shape[1], *where),
        numbers=(scale,),
        count=len(logits),
        width=logits.shape[1],
    )
