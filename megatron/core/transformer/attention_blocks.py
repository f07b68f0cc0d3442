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
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.packed_seq_params import PackedBounds
from megatron.core.transformer.attention_masks import VisibleKeys, Window, band

_aten = torch.ops.aten
SavedDropout = tuple[Tensor, ...]  # dropout state from forward that backward needs; may be empty
QKV = tuple[Tensor, Tensor, Tensor]


def attend_to_band(
    query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float
) -> Tensor:
    """Attend to the keys that a window, packed sequences and documents make visible.

    [q, b, n, d], 2 x [k, b, g, d] -> [q, b, n d].
    """
    num_tokens, num_rows = query.shape[:2]
    qkv = [x.transpose(0, 1) for x in (query, key, value)]
    bounds = visible.documents
    if visible.packed is not None:
        cumulative = visible.packed.kernel_bounds(num_tokens, num_rows)
        bounds = PackedBounds(cumulative, visible.packed.longest(num_tokens))
    options = _flash_options(scale, visible.window, 0.0)
    sizes: tuple[Any, ...] = None, None, num_tokens, len(key)
    if bounds is not None:
        qkv = [x.flatten(0, 1) for x in qkv]
        sizes = bounds.cumulative, bounds.cumulative, bounds.longest, bounds.longest
    forward = _aten._flash_attention_forward
    out: Tensor = forward(*qkv, *sizes, return_debug_mask=False, **options)[0]
    return out.view(num_rows, num_tokens, *out.shape[-2:]).transpose(0, 1).flatten(2)


def attend_to_narrow(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend to earlier keys by cuDNN: 2 x [s, b, n, d], [s, b, n, v] -> [s, b, n v].

    torch's flash attention requires values as wide as keys: those of latent attention (128) would
    be padded to the width of keys (192).
    """
    # The kernel saves its inputs: a view would keep the projection of keys and values in memory.
    qkv = (x.permute(1, 2, 0, 3) for x in (query, key, value.contiguous()))
    forward = _aten._scaled_dot_product_cudnn_attention
    out: Tensor = forward(*qkv, None, True, 0.0, True, False, scale=scale)[0]
    return out.permute(2, 0, 1, 3).flatten(2)


def _flash_options(scale: float, window: Window, dropout: float) -> dict[str, Any]:
    return {
        "dropout_p": dropout,
        "is_causal": window == (-1, 0),
        "scale": scale,
        "window_size_left": window[0],
        "window_size_right": window[1],
    }


@dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """How attention scores and probabilities are computed from q k^T."""

    scale: float
    depth_scale: int = 1  # divides q k^T and multiplies the fp32 scores: avoids fp16 overflow
    softcap: float | None = None
    dropout: float = 0.0

    def finish(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the depth scale, the soft cap and the bias to scaled products of q and k."""
        if self.depth_scale != 1:
            scores = scores * self.depth_scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores if bias is None else scores + bias.to(scores.dtype)


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """The inputs of one block; only the plain kernel supports a mask or a bias."""

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


class BlockKernel(NamedTuple):
    """Forward and backward function of an attention kernel.

    ``forward(call)`` returns output [b, n, q, d], log-sum-exp [b, n, q] and saved dropout state.
    ``backward(call, grad, out, lse, kept)`` returns the gradients of q, k and v; ``kept`` is that
    state.
    """

    forward: Callable[[BlockCall], tuple[Tensor, Tensor, SavedDropout]]
    backward: Callable[[BlockCall, Tensor, Tensor, Tensor, SavedDropout], QKV]
    takes_windows: bool = False  # without computing the scores outside


def block_kernel(name: str) -> BlockKernel:
    """Return the kernel ``flash``, ``fused`` or ``plain`` for this device."""
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
    scores = rule.finish(scores, call.bias)
    if call.is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(later, -math.inf)
    if call.window is not None:
        seen = band(*scores.shape[-2:], *call.window, q.device)
        scores = scores.masked_fill(~seen, -math.inf)
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
) -> QKV:
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
) -> QKV:
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (grad, call.q, call.k, call.v, out, lse, 0.0, call.is_causal)
    grads: QKV = kernel(*inputs, scale=call.rule.scale)
    return grads


def _flash_arguments(call: BlockCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return bounds and lengths of queries and keys, and the options."""
    window = call.window or (-1, 0 if call.is_causal else -1)
    sizes = None, None, call.q.shape[2], call.k.shape[2]
    return sizes, _flash_options(call.rule.scale, window, call.rule.dropout)


def _flash(call: BlockCall) -> tuple[Tensor, Tensor, SavedDropout]:
    qkv = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
    sizes, options = _flash_arguments(call)
    out, lse, *state = _aten._flash_attention_forward(
        *qkv, *sizes, return_debug_mask=False, **options
    )
    return out.transpose(1, 2), lse, tuple(state[:2])


def _flash_backward(
    call: BlockCall, grad: Tensor, out: Tensor, lse: Tensor, kept: SavedDropout
) -> QKV:
    inputs = (x.transpose(1, 2) for x in (grad, call.q, call.k, call.v, out))
    sizes, options = _flash_arguments(call)
    state = {"rng_state": kept[0], "unused": kept[1]}
    # The kernel ignores the strides of the log-sum-exp, here rows of a longer tensor.
    grads = _aten._flash_attention_backward(*inputs, lse.contiguous(), *sizes, **state, **options)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _cudnn(call: BlockCall) -> tuple[Tensor, Tensor, SavedDropout]:
    kernel = _aten._scaled_dot_product_cudnn_attention
    inputs = (call.q, call.k, call.v, None, True, 0.0, call.is_causal, False)
    out, lse, *_ = kernel(*inputs, scale=call.rule.scale)
    return out, lse.squeeze(-1), ()


def _cudnn_backward(
    call: BlockCall, grad: Tensor, out: Tensor, lse: Tensor, kept: SavedDropout
) -> QKV:
    kernel = _aten._scaled_dot_product_cudnn_attention_backward
    no_seed = lse.new_zeros((), dtype=torch.int64)
    inputs = (grad, call.q, call.k, call.v, out, lse.contiguous().unsqueeze(-1))
    state = (no_seed, no_seed, None, None, None, call.q.shape[2], call.k.shape[2], 0.0)
    grads: QKV = kernel(*inputs, *state, call.is_causal, scale=call.rule.scale)
    return grads


_KERNELS = {
    "plain": BlockKernel(_plain, _plain_backward),
    "flash": BlockKernel(_flash, _flash_backward, takes_windows=True),
    "flash without dropout": BlockKernel(_flash_cpu, _flash_cpu_backward),
    "fused": BlockKernel(_cudnn, _cudnn_backward),
}


@lru_cache
def cudnn_failure(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Return why cuDNN does not compute causal attention on this GPU, None if it does.

    torch documents neither which GPUs and releases of cuDNN take which widths, nor a check: a small
    attention runs once, forward and backward, and is compared with the formula in float64.
    """
    widths = head_dim, head_dim, value_dim, value_dim
    # Uncorrelated values without the random generator, whose state a run must not depend on.
    waves = (
        torch.arange(256 * n, dtype=torch.float64).square().mul(i + 0.7).sin()
        for i, n in enumerate(widths)
    )
    q, k, v, grad = (x.view(1, 2, 128, -1).to(device.current(), dtype) for x in waves)
    rule = ScoreRule(scale=head_dim**-0.5)
    results = []
    try:
        for name, to in (("fused", dtype), ("plain", torch.float64)):
            call = BlockCall(q=q.to(to), k=k.to(to), v=v.to(to), rule=rule, is_causal=True)
            out, lse, kept = _KERNELS[name].forward(call)
            grads = _KERNELS[name].backward(call, grad.to(to), out, lse, kept)
            results.append([out, *grads])
    except RuntimeError as error:
        return f"cuDNN: {str(error).splitlines()[0]}"
    for found, exact in zip(*results, strict=True):
        if not (found.double() - exact).norm() <= 2e-2 * exact.norm():  # also if NaN
            return "cuDNN computes other values than the formula"
    return None
