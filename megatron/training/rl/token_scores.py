"""Log-probability and entropy of each token, from logits that are sharded over the vocabulary.

Shapes: ``b`` rows, ``s`` tokens, ``v`` columns of the vocabulary, of which a rank holds v/tp.
Collectives over tp: those of the cross entropy, then for the entropy one max and one sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.cross_entropy import (
    at_least_float32,
    true_columns,
    vocab_parallel_cross_entropy,
)
from megatron.core.utils import get_attr_wrapped_model


class TokenScores(NamedTuple):
    """Scores [b, s] of the labels in float32; ``entropy`` is that of all tokens in their place."""

    log_probs: Tensor
    entropy: Tensor


def score_labels(
    model: nn.Module,
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    entropy_has_gradient: bool = False,
) -> TokenScores:
    """Score ``labels`` [b, s] by ``logits`` [b, s, v/tp] of ``model``, divided by ``temperature``.

    At temperature 1 the log-probabilities are the negated losses of training, by bits.
    """
    module: LanguageModule = get_attr_wrapped_model(model, "output_layer", return_model_obj=True)
    group = module.tp_group
    size = module.num_tokens if group.size() > 1 else None  # of one rank, logits have no padding
    if temperature != 1.0:
        logits = logits / temperature
    losses = vocab_parallel_cross_entropy(logits, labels, tp_group=group, vocab_size=size)
    columns = true_columns(logits.shape[-1], size, group)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        entropy = _Entropy.apply(logits, columns, group)
    return TokenScores(-losses, entropy)


class _Entropy(Function[Tensor]):
    """Entropy [...] of softmax(logits [..., v/tp]), whose first ``columns`` are no padding."""

    @staticmethod
    def forward(
        ctx: Context[tuple[int]], logits: Tensor, columns: int, group: ProcessGroup
    ) -> Tensor:
        true_logits = at_least_float32(logits[..., :columns])
        lowest = torch.finfo(true_logits.dtype).min
        highest = true_logits.amax(-1) if columns else true_logits.new_full((), lowest)
        highest = highest.expand(logits.shape[:-1]).clone()
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = true_logits - highest.unsqueeze(-1)
        share = shifted.exp()
        sums = torch.stack([share.sum(-1), (share * shifted).sum(-1)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy: Tensor = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, highest + log_sum, entropy)
        ctx.values = (columns,)
        return entropy

    @staticmethod
    def backward(ctx: Context[tuple[int]], grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum_exp, entropy = ctx.saved_tensors
        (columns,) = ctx.values
        log_share = at_least_float32(logits[..., :columns]) - log_sum_exp.unsqueeze(-1)
        found = -log_share.exp() * (log_share + entropy.unsqueeze(-1)) * grad.unsqueeze(-1)
        grad_logits = torch.zeros_like(logits)
        grad_logits[..., :columns] = found
        return grad_logits, None, None
