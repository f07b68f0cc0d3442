"""Merge the attention over one more block of keys into the attention over the blocks before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.fusions import kernels


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a block's output to ``out`` in place, each side weighted by exp(own lse - common lse).

    ``out`` and ``part`` [b, n, q, d], ``lse`` and ``part_lse`` [b, n, q], the log-sum-exp of their
    scores: -inf without a key.  ``out`` and ``lse`` are in the dtype of the sums.
    """
    is_strided = out.stride(-1) == part.stride(-1) == 1
    if is_strided and (found := kernels.find("attention_merge", out, lse, part, part_lse)):
        found.merge_attention(out, lse, part, part_lse)
        return
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    safe = total.masked_fill(total == -math.inf, 0.0)  # no key yet: -inf - -inf would be NaN
    out.mul_(torch.exp(lse - safe).unsqueeze(-1))
    out.add_(part * torch.exp(part_lse - safe).unsqueeze(-1))
    lse.copy_(total)
