"""The kernels' formulas in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.fusions.rope import RotaryTable


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, *, vocab_size: int | None = None
) -> Tensor:
    """[t, h], [p, h], [t] -> loss of each token [t], for a group of one."""
    logits = F.linear(x, weight)[:, :vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = logits.logsumexp(-1) - logits.gather(-1, target.clamp_min(0)[:, None]).squeeze(-1)
    return loss.masked_fill(target < 0, 0)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[s, b, n, d], 2 x [s, b, g, d] -> [s, b, n, d]"""
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bnqk,kbnd->qbnd", scores.masked_fill(later, -math.inf).softmax(-1), value)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., h], [h] -> [..., h]"""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def apply_rotary(x: Tensor, table: RotaryTable) -> Tensor:
    """[s, b, n, d] -> [s, b, n, d]"""
    width = 2 * table.cos.shape[-1]
    turned = x[..., :width]
    if table.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, -1)
    both = first * table.cos - second * table.sin, second * table.cos + first * table.sin
    rotated = torch.stack(both, -1).flatten(-2) if table.interleaved else torch.cat(both, -1)
    return torch.cat((rotated, x[..., width:]), -1)
