"""Attention kernels for one block of queries and keys, whose results can be merged over blocks.

``q`` queries, ``k`` keys, ``b`` sequences, ``n`` heads, ``g`` key/value heads, ``d`` head width.
Forward returns the output of a block and the log-sum-exp of its scores [b, n, q], which weighs the
block when outputs are merged.  Backward takes the output and the log-sum-exp of all blocks
together, and returns this block's terms of the gradients: with them, each block's probabilities
and softmax gradients are those of the complete attention (FlashAttention, arXiv 2205.14135).

Flash attention on a GPU also takes sliding windows and packed sequences, without a mask in memory:
torch's `scaled_dot_product_attention` computes all scores of a mask, the kernel behind it skips the
blocks of keys that no query of a block attends to.  Its layouts are [b, s, n or g, d] and, for
packed sequences, [t, n or g, d]; only the last dimension has to be contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import device
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


_aten = torch.ops.aten
SavedDropout = tuple[Tensor, ...]  # dropout state from forward that backward needs; may be empty


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """How attention scores and probabilities are computed from q k^T."""

    scale: float
    depth_scale: int = 1  # divides q k^T and multiplies the fp32 scores: avoids fp16 overflow
    softcap: float | None = None
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """The inputs of one block.

    Only the plain kernel supports a mask or a bias, only a kernel with ``takes_windows`` a window.
    """

    q: Tensor  # [b, n, q, d]
    k: Tensor  # [b, g, k, d]
    v: Tensor  # [b, g, k, d]
    rule: ScoreRule
    is_causal: bool = False  # query i attends to keys 0 .. i of the block
    # Number of visible keys (left, right) beside a query's own position, -1 for all.  The last
    # query has the position of the last key.
    window: Window | None = None
    visible: Tensor | None = None  # bool, broadcast to [b, n, q, k]: False hides the key
    bias: Tensor | None = None  # added to the scores


@dataclass(frozen=True)
class BlockKernel:
    """Forward and backward function of an attention kernel.

    ``forward(call)`` returns output [b, n, q, d], log-sum-exp [b, n, q] and saved dropout state.
    ``backward(call, grad, out, lse, kept)`` returns the gradients of q, k and v; ``kept`` is that
    state.
    """

    forward: Callable[[BlockCall], tuple[Tensor, Tensor, SavedDropout]]
    backward: Callable[
        [BlockCall, Tensor, Tensor, Tensor, SavedDropout], tuple[Tensor, Tensor, Tensor]
    ]
    takes_windows: bool = False


def block_kernel(name: str) -> BlockKernel:
    """Return the kernel ``flash``, ``fused``, ``efficient`` or ``plain`` for this device."""
    if name == "flash" and not device.is_cuda():
        name = "flash without dropout"
    return _KERNELS[name]


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums over blocks: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


# -- the formula ----------------------------------------------------------------------------


def _scores(call: BlockCall, q: Tensor, k: Tensor) -> Tensor:
    """Return scores [b, n, q, k], -inf for hidden keys."""
    rule = call.rule
    grouped = q.unflatten(1, (k.shape[1], -1)) * (rule.scale / rule.depth_scale)
    scores = torch.matmul(grouped, k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2).to(wide(q))
    if rule.depth_scale != 1:
        scores = scores * rule.depth_scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if call.bias is not None:
        scores = scores + call.bias.to(scores.dtype)
    if call.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores if call.visible is None else scores.masked_fill(~call.visible, -math.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), 0 in a row without visible keys."""
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))


def _weighted(probs: Tensor, v: Tensor, kept: SavedDropout, dropout: float) -> Tensor:
    if kept:
        probs = probs * kept[0] * (1 / (1 - dropout))
    grouped = probs.to(v.dtype).unflatten(1, (v.shape[1], -1))
    return torch.matmul(grouped, v.unsqueeze(2)).flatten(1, 2)


def _plain(call: BlockCall) -> tuple[Tensor, Tensor, SavedDropout]:
    scores, dropout = _scores(call, call.q, call.k), call.rule.dropout
    lse = torch.logsumexp(scores, -1)
    kept = (torch.rand_like(scores) >= dropout,) if dropout > 0 else ()
    return _weighted(_probabilities(scores, lse), call.v, kept, dropout), lse, kept


def _plain_backward(
    call: BlockCall, grad: Tensor, out: Tensor, lse: Tensor, kept: SavedDropout
) -> tuple[Tensor, Tensor, Tensor]:
    # The softmax gradient is P * (dP - D) with D = sum(dO * O) over the complete attention.  Here
    # P = exp(scores - lse) with lse constant, so the second output, whose gradient is -D, yields
    # the term -P * D.
    along = (grad.to(wide(out)) * out.to(wide(out))).sum(-1)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
        probs = _probabilities(_scores(call, q, k), lse)
        weighted = _weighted(probs, v, kept, call.rule.dropout)
        dq, dk, dv = torch.autograd.grad(
            (weighted, probs.sum(-1)), (q, k, v), (grad.to(weighted.dtype), -along)
        )
    return dq, dk, dv


# -- torch's kernels ------------------------------------------------------------------------


def _flash_cpu(call: BlockCall) -> tuple[Tensor, Tensor, SavedDropout]:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(call.q, call.k, call.v, 0.0, call.is_causal, scale=call.rule.scale)
    return out, lse, ()


def _flash_cpu_backward(
    call: BlockCall, grad: Tensor, out: Tensor, lse: Tensor, kept: SavedDropout
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (grad, call.q, call.k, call.v, out, lse, 0.0, call.is_causal)
    dq, dk, dv = kernel(*inputs, scale=call.rule.scale)
    return dq, dk, dv


def _flash_rule(call: BlockCall) -> FlashRule:
    window = call.window or (-1, 0 if call.is_causal else -1)
    return FlashRule(call.rule.scale, window, call.rule.dropout)


def _flash(call: BlockCall) -> tuple[Tensor, Tensor, SavedDropout]:
    q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    out, lse, state = flash_attention(q, k, v, _flash_rule(call))
    return out.transpose(1, 2), lse, state


def _flash_backward(
    call: BlockCall, grad: Tensor, out: Tensor, lse: Tensor, kept: SavedDropout
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, call.q, call.k, call.v, out))
    # The kernel ignores the strides of the log-sum-exp, here rows of a longer tensor.
    rule = _flash_rule(call)
    grads = flash_attention_backward(grad, (q, k, v), out, lse.contiguous(), kept, rule)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _for_each_query_head(call: BlockCall) -> tuple[Tensor, Tensor]:
    """Repeat key and value heads to the number of query heads."""
    times = call.q.shape[1] // call.k.shape[1]
    return call.k.repeat_interleave(times, 1), call.v.repeat_interleave(times, 1)


def _efficient(call: BlockCall) -> tuple[Tensor, Tensor, SavedDropout]:
    kernel = _aten._scaled_dot_product_efficient_attention
    inputs = (call.q, *_for_each_query_head(call), None, True, call.rule.dropout, call.is_causal)
    out, lse, *kept = kernel(*inputs, scale=call.rule.scale)
    return out, lse[..., : call.q.shape[2]], tuple(kept)


def _efficient_backward(
    call: BlockCall, grad: Tensor, out: Tensor, lse: Tensor, kept: SavedDropout
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_efficient_attention_backward
    lse = F.pad(lse, (0, -lse.shape[-1] % 32))  # forward gave rows of a multiple of 32
    # In 16 bits the kernel computes D = sum(dO * O) itself and ignores the strides of the output,
    # here rows of a longer tensor: it takes it to be dense, with tokens before heads.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    inputs = (grad, call.q, *_for_each_query_head(call), None, out, lse, *kept)
    needs = [True, True, True, False]
    dq, dk, dv, _ = kernel(*inputs, call.rule.dropout, needs, call.is_causal, scale=call.rule.scale)
    groups = call.k.shape[1]
    return dq, dk.unflatten(1, (groups, -1)).sum(2), dv.unflatten(1, (groups, -1)).sum(2)


def _cudnn(call: BlockCall) -> tuple[Tensor, Tensor, SavedDropout]:
    kernel = _aten._scaled_dot_product_cudnn_attention
    inputs = (call.q, call.k, call.v, None, True, 0.0, call.is_causal, False)
    out, lse, *_ = kernel(*inputs, scale=call.rule.scale)
    return out, lse.squeeze(-1), ()


def _cudnn_backward(
    call: BlockCall, grad: Tensor, out: Tensor, lse: Tensor, kept: SavedDropout
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = _aten._scaled_dot_product_cudnn_attention_backward
    no_seed = lse.new_zeros((), dtype=torch.int64)
    inputs = (grad, call.q, call.k, call.v, out, lse.contiguous().unsqueeze(-1))
    state = (no_seed, no_seed, None, None, None, call.q.shape[2], call.k.shape[2], 0.0)
    dq, dk, dv = kernel(*inputs, *state, call.is_causal, scale=call.rule.scale)
    return dq, dk, dv


_KERNELS = {
    "plain": BlockKernel(_plain, _plain_backward),
    "flash": BlockKernel(_flash, _flash_backward, takes_windows=True),
    "flash without dropout": BlockKernel(_flash_cpu, _flash_cpu_backward),
    "fused": BlockKernel(_cudnn, _cudnn_backward),
    "efficient": BlockKernel(_efficient, _efficient_backward),
}
