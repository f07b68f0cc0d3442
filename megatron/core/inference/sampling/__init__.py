"""Sample tokens from logits.  Shapes: ``b`` sequences, ``v`` vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.inference.sampling_params import SamplingParams


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    """Sample one token per row: [b, v] -> [b].  Greedy ties go to the smallest id."""
    if params.is_greedy:
        return logits.argmax(dim=-1)
    logits = logits.float() / params.temperature
    if params.top_k:
        logits = keep_top_k(logits, params.top_k)
    if params.top_p:
        logits = keep_top_p(logits, params.top_p)
    probabilities = torch.softmax(logits, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the ``k`` largest logits of each row to -inf."""
    k = min(k, logits.size(-1))
    threshold = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < threshold, float("-inf"))


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Set logits outside the smallest set of likely tokens with total probability ``p`` to -inf.

    Nucleus sampling, Holtzman et al. 2020.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill(before >= p, float("-inf"))
    return torch.empty_like(logits).scatter(-1, order, ordered)
