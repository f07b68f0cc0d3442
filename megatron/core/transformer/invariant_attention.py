"""Causal attention of a training pass in the summation order of generation.

`paged_attention` computes the forward pass, so that a token gets the bits that the generation
engine gives it.  Backward computes the attention again by the default implementation and
differentiates that one: the gradients are those of the default mode, up to rounding.

``s`` tokens, ``b`` sequences, ``n`` query and ``g`` key/value heads, ``d`` head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions.paged_attention import PagedBatch, PagedRule, paged_attention

# query, key, value, scores of the sink or None -> [s, b, n d]
DefaultAttention: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def invariant_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: PagedRule,
    lengths: tuple[int, ...],
    default: DefaultAttention,
) -> Tensor:
    """Attend: [s, b, n, d], 2 x [s, b, g, d] -> [s, b, n d].

    ``lengths``: lengths of the documents packed in each sequence; tokens see their own document.
    ``default`` computes the same in any summation order; backward differentiates it.
    """
    return _Attention.apply(query, key, value, rule.sink, rule, lengths, default)


class _Attention(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[DefaultAttention],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        rule: PagedRule,
        lengths: tuple[int, ...],
        default: DefaultAttention,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sink)
        ctx.values = default
        s, b = query.shape[:2]
        # A token is a page, in the memory order of keys: token t of sequence i is page t b + i.
        keys, values = (x.contiguous().flatten(0, 1).unsqueeze(1) for x in (key, value))
        rows = query.transpose(0, 1).flatten(0, 1)  # a document's rows follow each other
        out = paged_attention(rows, keys, values, _batch_of(lengths, b), rule)
        return out.view(b, s, -1).transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Context[DefaultAttention], grad: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, sink = ctx.saved_tensors
        needed = ctx.needs_input_grad[:4]
        q, k, v = (x.detach().requires_grad_(n) for x, n in zip(qkv, needed, strict=False))
        sink = None if sink is None else sink.detach().requires_grad_(needed[3])
        with torch.enable_grad():
            out = ctx.values(q, k, v, sink)
        inputs = [x for x in (q, k, v, sink) if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(out, inputs, grad))
        return *(next(found) if n else None for n in needed), None, None, None


def _batch_of(lengths: tuple[int, ...], num_sequences: int) -> PagedBatch:
    """Return the segments of documents of ``lengths`` in each of ``num_sequences`` sequences."""
    num_tokens = sum(lengths)
    longest = max(lengths)
    of_all = torch.tensor(lengths, dtype=torch.int32).repeat(num_sequences)
    ends = of_all.cumsum(0, dtype=torch.int32)
    starts = (ends - of_all) % num_tokens
    sequence = torch.arange(num_sequences, dtype=torch.int32).repeat_interleave(len(lengths))
    tokens = starts[:, None] + torch.arange(longest, dtype=torch.int32)
    table = tokens.clamp(max=num_tokens - 1) * num_sequences + sequence[:, None]
    return PagedBatch(torch.cat([ends.new_zeros(1), ends]), of_all, table.contiguous())
