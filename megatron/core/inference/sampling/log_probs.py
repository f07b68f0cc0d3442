"""Log-probabilities of the model.  Shapes: ``r`` rows, ``v`` vocabulary, ``n`` tokens of a row."""

from __future__ import annotations

from torch import Tensor

from megatron.core.fusions import kernels
from megatron.core.fusions.small_linear import small_linear


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [r, n] of ``tokens`` [r, n], in the steps of the training loss.

    The bits of a row do not depend on the number of rows.
    """
    highest = logits.amax(-1, keepdim=True)
    terms = (logits - highest).exp_()
    if kernels.find("matmul", terms) is not None:  # torch's sums on a GPU depend on the rows
        sums = small_linear(terms, terms.new_ones(1, terms.shape[1]))[:, 0]
    else:  # torch divides a single sum among threads, and then adds in another order
        sums = terms.repeat(2, 1).sum(-1)[:1] if len(terms) == 1 else terms.sum(-1)
    return logits.gather(-1, tokens) - highest - sums.log()[:, None]
