"""Log-probabilities of the model: of chosen tokens, and the most likely tokens.

Shapes: ``r`` rows, ``v`` vocabulary, ``n`` likely tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [r, n] of ``tokens`` [r, n], in the steps of the training loss.

    The bits of a row do not depend on the number of rows.
    """
    highest = logits.amax(-1, keepdim=True)
    terms = (logits - highest).exp_()
    # torch divides a single sum among threads, and then adds in another order
    sums = terms.repeat(2, 1).sum(-1)[:1] if len(terms) == 1 else terms.sum(-1)
    return logits.gather(-1, tokens) - highest - sums.log()[:, None]


def likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the tokens [r, n] of the ``count`` largest logits, best first.

    Of equal logits the smallest ids come first, whatever ``count`` is: the keys of the search
    hold the logit's bits, in an order in which they compare as integers, above the inverted id.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
    keys += torch.arange(logits.size(1) - 1, -1, -1, device=logits.device)
    best = keys.topk(min(count, logits.size(1)), dim=-1).values
    return logits.size(1) - 1 - (best & 0xFFFFFFFF)
