"""Rules that change logits before a token is chosen: bias, penalties, hidden and allowed tokens.

Each function changes ``logits`` [r, v], fp32, in place.
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalise(logits: Tensor, counts: Tensor, in_prompt: Tensor, penalties: Tensor) -> None:
    """Lower the logits of tokens that a text has.

    ``counts`` [r, v]: how often a token was generated; ``in_prompt`` [r, v]: whether the prompt
    has it.  ``penalties`` [r, 3]: repetition (Keskar et al. 2019: divides positive logits and
    multiplies others, of generated tokens and the prompt's), presence and frequency (subtracted,
    of generated tokens only).
    """
    repetition, presence, frequency = penalties.split(1, dim=-1)
    is_generated = counts > 0
    penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(is_generated | in_prompt, penalised, logits)
    torch.sub(penalised, is_generated * presence + counts * frequency, out=logits)


def keep_allowed(logits: Tensor, words: Tensor) -> None:
    """Set the logits of tokens to -inf whose bit is 0; bit t % 32 of ``words`` [r, w][t // 32].

    Tokens beyond the words are not allowed.
    """
    bits = (words[..., None] >> torch.arange(32, device=words.device)) & 1
    allowed = bits.flatten(1).bool()[:, : logits.size(1)]
    logits[:, : allowed.size(1)].masked_fill_(~allowed, float("-inf"))
    logits[:, allowed.size(1) :] = float("-inf")
