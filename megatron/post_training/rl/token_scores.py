"""Log-probability and entropy of each token, from logits that are sharded over the vocabulary.

Shapes: ``b`` rows, ``s`` tokens, ``v`` columns of the vocabulary, of which a rank holds v/tp.
Collectives over tp: those of the cross entropy, then for the entropy one max and one sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.tensor_parallel.cross_entropy import (
    at_least_float32,
    vocab_parallel_cross_entropy,
)


class TokenScores(NamedTuple):
    """Scores [b, s] of the labels in float32; ``entropy`` is that of all tokens in their place."""

    log_probs: Tensor
    entropy: Tensor


def score_labels(
    logits: Tensor,
    labels: Tensor,
    group: ProcessGroup,
    *,
    temperature: float,
    entropy_has_gradient: bool = False,
) -> TokenScores:
    """Score ``labels`` [b, s] by ``logits`` [b, s, v/tp], which are divided by ``temperature``.

    Logits of padding are -inf.  At temperature 1 the log-probabilities are the negated losses of
    training, by bits on one rank.  Collective over ``group``, that of tensor parallelism.
    """
    if temperature != 1.0:
        logits = logits / temperature
    losses = vocab_parallel_cross_entropy(logits, labels, tp_group=group)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        entropy = _Entropy.apply(logits, group)
    return TokenScores(-losses, entropy)


class _Entropy(Function[Tensor]):
    """Entropy [...] of softmax(logits [..., v/tp])."""

    @staticmethod
    def forward(ctx: Context[None], logits: Tensor, group: ProcessGroup) -> Tensor:
        highest = at_least_float32(logits).amax(-1)
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = _finite(at_least_float32(logits) - highest.unsqueeze(-1))
        share = shifted.exp()
        sums = torch.stack([share.sum(-1), (share * shifted).sum(-1)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy: Tensor = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, highest + log_sum, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum_exp, entropy = ctx.saved_tensors
        log_share = _finite(at_least_float32(logits) - log_sum_exp.unsqueeze(-1))
        found = -log_share.exp() * (log_share + entropy.unsqueeze(-1)) * grad.unsqueeze(-1)
        return found.to(logits.dtype), None


def _finite(log_share: Tensor) -> Tensor:
    """Return logarithms in which those of padding are finite, so that 0 times them is 0."""
    return log_share.clamp(min=torch.finfo(log_share.dtype).min)
