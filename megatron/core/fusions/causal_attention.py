"""Causal attention for training on a CPU, in blocks of queries that skip the keys after them.

``s`` tokens, ``b`` sequences, ``n`` query and ``g`` key/value heads, ``d`` head width, ``m`` = b n.
Batched matmuls over many heads run twice as fast as torch's fused kernel, whose matmuls are too
small for a CPU.  Scores and softmax are float32; probabilities are saved for backward in the
compute dtype, so their memory grows with s^2 and long sequences use torch's fused kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.device import cpu_kernels

BLOCK = 128  # queries
_SCORES = 1 << 21  # at a time, so that they stay in the cache
_WIDE = torch.float32


_Values = tuple[float, float, bool]  # scale, dropout, fused


class _CausalAttention(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_Values],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        dropout: float,
        fused: bool,
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        q, k, v = _heads_first(query), _heads_first(key), _heads_first(value)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        out_msd, wide = out.flatten(1, 2).transpose(0, 1), torch.promote_types(q.dtype, _WIDE)
        kept = []
        for heads in _passes(q):
            wide_q, keys_by_query = q[heads].to(wide) * scale, k[heads].to(wide).transpose(1, 2)
            for i, (start, stop) in enumerate(_blocks(q.shape[1])):
                scores = torch.bmm(wide_q[:, start:stop], keys_by_query[:, :, :stop])
                if masks and (mask := masks[i]) is not None:
                    # A sum takes a quarter of the time of masked_fill_ on all heads.
                    hiding = torch.zeros_like(mask, dtype=wide).masked_fill_(~mask, -math.inf)
                    if len(mask) > 1:
                        hiding = hiding.repeat_interleave(query.shape[2], 0)[heads]
                    scores.add_(hiding)
                probs = _causal_softmax(scores, start, q.dtype, fused=fused)
                kept.append(probs)
                if dropout > 0:
                    probs, is_kept = torch.native_dropout(probs, dropout, True)
                    kept.append(is_kept)
                out_msd[heads, start:stop] = torch.bmm(probs, v[heads, :stop])
        ctx.save_for_backward(q, k, v, *kept)
        ctx.values = scale, dropout, fused
        return out

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        scale, dropout, fused = ctx.values
        num_sequences, grad = grad.shape[1], _heads_first(grad)
        scaled_q, scaled_k = q * scale, k * scale
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        blocks = [(heads, span) for heads in _passes(q) for span in _blocks(q.shape[1])]
        # From the last block of each pass: it is the one that reaches all keys.
        for heads, (start, stop) in reversed(blocks):
            rows, is_kept = grad[heads, start:stop], kept.pop() if dropout > 0 else None
            probs = dropped = kept.pop()
            grad_probs = torch.bmm(rows, v[heads, :stop].transpose(1, 2))
            if is_kept is not None:
                dropped = probs * is_kept * (1 / (1 - dropout))
                grad_probs = grad_probs.mul_(is_kept).mul_(1 / (1 - dropout))
            grad_scores = _causal_softmax_backward(grad_probs, probs, start, fused=fused)
            grad_q[heads, start:stop] = torch.bmm(grad_scores, scaled_k[heads, :stop])
            more_k = torch.bmm(grad_scores.transpose(1, 2), scaled_q[heads, start:stop])
            more_v = torch.bmm(dropped.transpose(1, 2), rows)
            if stop == q.shape[1]:
                grad_k[heads], grad_v[heads] = more_k, more_v
            else:
                grad_k[heads, :stop] += more_k
                grad_v[heads, :stop] += more_v
        grads = (x.unflatten(0, (num_sequences, -1)) for x in (grad_q, grad_k, grad_v))
        return *(x.permute(2, 0, 1, 3) for x in grads), None, None, None, None


def _causal_softmax(scores: Tensor, start: int, dtype: torch.dtype, *, fused: bool) -> Tensor:
    """Return the probabilities of queries from ``start`` on; overwrites ``scores``."""
    probs = scores if scores.dtype == dtype else torch.empty_like(scores, dtype=dtype)
    if fused and scores.dtype == torch.float32 and cpu_kernels.take(probs):
        _run("causal_softmax", scores, probs, start)
        return probs
    scores[:, :, start:].add_(_hidden(scores.shape[1], scores.dtype, scores.device))
    return torch.softmax(scores, -1, out=scores).to(dtype)


def _causal_softmax_backward(grad: Tensor, probs: Tensor, start: int, *, fused: bool) -> Tensor:
    """Return the gradient of the scores; overwrites ``grad``."""
    if fused and cpu_kernels.take(grad, probs):
        _run("causal_softmax_backward", grad, probs, start)
        return grad
    return torch._softmax_backward_data(grad, probs, -1, probs.dtype)


def _run(kernel: str, first: Tensor, probs: Tensor, start: int) -> None:
    heads, queries, keys = probs.shape
    cpu_kernels.run(
        kernel,
        [first, probs],
        format=probs.dtype,
        sizes=(queries, keys, start),
        count=heads * queries,
        width=keys,
    )


def _heads_first(x: Tensor) -> Tensor:
    """Copy [s, b, n, d] -> [m, s, d]: matmuls of contiguous tensors are twice as fast."""
    return x.permute(1, 2, 0, 3).contiguous().flatten(0, 1)


def _blocks(num_tokens: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_tokens, BLOCK):
        yield start, min(start + BLOCK, num_tokens)


def _passes(q: Tensor) -> Iterator[slice]:
    """Split the heads into the groups that are computed together."""
    heads = max(1, _SCORES // (BLOCK * q.shape[1]))
    for start in range(0, q.shape[0], heads):
        yield slice(start, min(start + heads, q.shape[0]))


@lru_cache(maxsize=16)
def _hidden(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a mask that is -inf where a key comes after the query."""
    return torch.full((size, size), -math.inf, dtype=dtype, device=device).triu(1)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float = 0.0,
    *,
    fused: bool = True,
    masks: Sequence[Tensor | None] = (),
) -> Tensor:
    """Attend [s, b, n, d], 2 x [s, b, g, d] -> [s, b, n, d], contiguous, with dropout.

    ``masks``: for each `BLOCK` of queries a mask [b, q, keys up to the last query] of the keys that
    they attend to, at least one for each query; None: all.
    """
    group = query.shape[2] // key.shape[2]
    if group > 1:
        key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    return _CausalAttention.apply(query, key, value, scale, dropout, fused, masks)
