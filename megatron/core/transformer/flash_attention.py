"""Flash attention on a GPU with sliding windows and packed sequences: no mask in memory.

``b`` rows, ``s`` tokens of a row, ``t`` tokens of all packed sequences, ``n`` query heads, ``g``
key/value heads (n a multiple of g), ``d`` head width.  Layouts are [b, s, n or g, d] and, for
packed sequences, [t, n or g, d]; only the last dimension has to be contiguous.

torch's `scaled_dot_product_attention` takes neither windows nor lengths, and computes all scores
of a mask; the kernel behind it skips the blocks of keys that no query of a block attends to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedBounds
from megatron.core.transformer.attention_masks import VisibleKeys, Window


class FlashRule(NamedTuple):
    """How scores become probabilities.

    ``window`` counts the visible keys (left, right) of the query's position; -1 is unlimited, and
    the last query of a sequence has the position of its last key.
    """

    scale: float
    window: Window = (-1, -1)
    dropout: float = 0.0
    bounds: PackedBounds | None = None


def attend_to_band(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float
) -> Tensor:
    """Attend to the keys that a window, packed sequences and documents make visible.

    [q, b, n, d], 2 x [k, b, g, d] -> [q, b, n d].
    """
    assert visible.is_band, "the kernel takes no mask"
    num_tokens, num_rows = query.shape[:2]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    bounds = visible.documents
    if visible.packed is not None:
        cumulative = visible.packed.kernel_bounds(num_tokens, num_rows)
        bounds = PackedBounds(cumulative, visible.packed.longest(num_tokens))
    if bounds is None:
        out, *_ = flash_attention(q, k, v, FlashRule(scale, visible.window))
        return out.transpose(0, 1).flatten(2)
    rule = FlashRule(scale, visible.window, bounds=bounds)
    out, *_ = flash_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), rule)
    return out.view(num_rows, num_tokens, *out.shape[1:]).transpose(0, 1).flatten(2)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: FlashRule
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Attend; differentiable in the first result.

    Returns the output like q, the log-sum-exp of the scores (float32, [b, n, s] or [n, t]), and the
    state of dropout that `flash_attention_backward` needs.
    """
    out, lse, *state = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *_sizes(q, k, rule)),
        rule.dropout,
        rule.window == (-1, 0),
        False,
        scale=rule.scale,
        window_size_left=rule.window[0],
        window_size_right=rule.window[1],
    )
    return out, lse, tuple(state[:2])


def flash_attention_backward(
    grad: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    state: tuple[Tensor, ...],
    rule: FlashRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.  The kernel ignores the strides of ``lse``."""
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(grad, *qkv, out, lse, *_sizes(*qkv[:2], rule)),
        rule.dropout,
        rule.window == (-1, 0),
        *state,
        scale=rule.scale,
        window_size_left=rule.window[0],
        window_size_right=rule.window[1],
    )
    return dq, dk, dv


def _sizes(q: Tensor, k: Tensor, rule: FlashRule) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the kernel's bounds and longest sequences of queries and of keys."""
    if rule.bounds is None:
        return None, None, q.shape[1], k.shape[1]
    bounds, longest = rule.bounds
    return bounds, bounds, longest, longest
