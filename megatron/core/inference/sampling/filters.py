"""Top-k, top-p and min-p as a least logit of each row: tokens below it are not sampled.

Tokens of equal logits are kept together, so that the set of tokens does not depend on the order
of a sort.  Shapes: ``r`` rows, ``v`` vocabulary.  All logits are divided by the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filters:
    """Parameters of r rows, and on the host what of them is in use.

    ``top_k`` [r] int64, v or more: no limit; ``top_p`` [r], 1: no limit; ``min_p`` [r], 0: none.
    ``largest_k``: of the rows that have a limit, 0 if none has.  ``has_top_p_only``: some row has
    top_p without top_k.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    largest_k: int
    has_top_p: bool
    has_top_p_only: bool
    has_min_p: bool


def least_logits(logits: Tensor, filters: Filters) -> Tensor | None:
    """Return the least logit [r] that a token needs in each row; None if there is no filter."""
    least = None
    if filters.largest_k or filters.has_top_p:
        count = logits.size(1) if filters.has_top_p_only else filters.largest_k
        count = min(count, logits.size(1))
        best = logits.topk(count, dim=-1).values
        last = filters.top_k.clamp(max=count) - 1
        least = best.gather(-1, last[:, None])[:, 0]
        least = least.masked_fill(filters.top_k > count, float("-inf"))
        if filters.has_top_p:
            least = torch.maximum(least, _least_of_top_p(best, last, filters.top_p))
    if filters.has_min_p:
        of_min_p = logits.amax(-1) + filters.min_p.log()
        least = of_min_p if least is None else torch.maximum(least, of_min_p)
    return least


def _least_of_top_p(best: Tensor, last: Tensor, top_p: Tensor) -> Tensor:
    """Return the least logit of the smallest set of likely tokens with probability ``top_p``.

    ``best`` [r, k]: logits in descending order; those after ``last`` [r] do not count.
    Nucleus sampling, Holtzman et al. 2020.
    """
    rank = torch.arange(best.size(1), device=best.device)
    weights = (best - best[:, :1]).exp_().masked_fill_(rank > last[:, None], 0)
    before = weights.cumsum(-1, dtype=torch.float64)
    enough = top_p[:, None] * before[:, -1:]
    before -= weights
    # rows without a limit keep every token, also where rounding makes `before` the total
    kept = (before < enough) | (top_p[:, None] >= 1)
    kept[:, 0] = True
    return best.masked_fill(~kept, float("inf")).amin(-1)
