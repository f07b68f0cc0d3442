"""Context parallelism: the communication of --cp-comm-type around an attention core.

``s`` local tokens, ``c`` context-parallel ranks, ``b`` sequences, ``n`` query heads, ``g``
key/value heads, ``d`` head width, all after tensor parallelism.

    p2p        each rank sends its keys and values around a ring; queries stay
    a2a        all-to-all from tokens to heads: [s, b, n, d] -> [s c, b, n/c, d], and back
    allgather  keys and values are all-gathered; their gradients are reduce-scattered
    a2a+p2p    all-to-all within groups of neighbouring ranks, a ring across these groups

Ranks hold two chunks each of a causal sequence, so the tokens of gathered tensors are not in global
order; `order_of_gathered` restores it.  Masks and biases have one row per local query and one
column per key of the complete sequence, in global order.

Ring attention (arXiv 2310.01889).  In step t, rank i holds the keys and values of rank i - t
(modulo r, the number of ranks).  Every shift is one batch of a send to the next rank and a receive
from the previous one, in the same order on all ranks.

- Forward: r - 1 shifts of keys and values, each posted before the attention of the current step.
- Backward, in each step: post the shift of keys and values (but in the last step); compute the
  block gradients; wait for the partial gradients that the previous rank posted one step earlier,
  which belong to the same keys, and add them; post the shift of the sum; wait for keys and values.
  With the r-th shift the complete gradients arrive at the rank that owns the keys.

Sums over blocks are in float32 (float64 for float64), in the order of the steps, which differs from
rank to rank.  A sink [n] is the score of an extra key with value 0 that every query attends to; it
counts as the first block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.config.errors import ConfigError
from megatron.core.model_parallel_config import COMM_TYPES, ModelParallelConfig
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import (
    Block,
    Span,
    blocks_of,
    held_spans,
    held_tokens,
    order_of_gathered,
    row_lengths,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_gather_first_dim,
    all_to_all_first_dim,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention_blocks import (
    QKV,
    BlockCall,
    BlockKernel,
    SavedDropout,
    ScoreRule,
    wide,
)
from megatron.core.transformer.attention_masks import Window

_QUERIES = 128  # minimum number of queries per block with a sliding window


class Ring:
    """A ring over the ranks of a group; None is a ring of this rank alone."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())

    def shift(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to send ``x`` to the next rank and to receive the same shape from the previous one.

        ``x`` is contiguous; it may be read but not written before the returned function has run,
        which waits for both and returns the received tensor.
        """
        if self.group is None:
            return lambda: x
        received = torch.empty_like(x)
        behind, ahead = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        operations = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=ahead),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=behind),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> Tensor:
            for work in works:
                work.wait()
            operations.clear()  # until now the buffers must not be reused
            return received

        return wait


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """The attention that a ring computes; ``context`` has local rows and global columns."""

    ring: Ring
    lengths: tuple[int, ...]  # of the sequences in a row, over all ranks of the ring
    kernel: BlockKernel
    rule: ScoreRule
    context: AttentionContext
    window: Window | None = None  # if causal, its right side is 0

    def calls(
        self, q: Tensor, k: Tensor, v: Tensor, step: int
    ) -> Iterator[tuple[Block, BlockCall]]:
        """Yield the blocks of a step; layouts q [b, n, s, d], k and v [b, g, s, d].

        Blocks in which no query attends to a key are left out.
        """
        source = (self.ring.rank - step) % self.ring.size
        where = self.lengths, self.ring.rank, source, self.ring.size
        blocks: Iterable[tuple[Block, Window | None]]
        if self.window is None:
            blocks = ((block, None) for block in blocks_of(*where, self.context.is_causal))
        else:
            blocks = _bands(*where, self.window, self.kernel.takes_windows)
        hidden = self.context.hidden
        bias = self.context.bias
        for block, window in blocks:
            keys = held_tokens(self.lengths, source, self.ring.size, q.device)[block.keys]
            yield (
                block,
                BlockCall(
                    q=q[:, :, block.queries],
                    k=k[:, :, block.keys],
                    v=v[:, :, block.keys],
                    rule=self.rule,
                    is_causal=block.is_causal,
                    window=window,
                    visible=None if hidden is None else ~hidden[..., block.queries, :][..., keys],
                    bias=None if bias is None else bias[..., block.queries, :][..., keys],
                ),
            )


@lru_cache(maxsize=256)
def _bands(
    lengths: tuple[int, ...], rank: int, source: int, size: int, window: Window, skips_keys: bool
) -> tuple[tuple[Block, Window], ...]:
    """Return blocks for each pair of spans with a visible key, and the window of each block.

    A block has contiguous positions, and each of its queries attends to a key.  The kernel places
    the last query of a block at its last key; its window is moved by their distance.  Unless the
    kernel ``skips_keys`` outside the window, a block has as many queries as the window has keys,
    but at least `_QUERIES`: shorter blocks would read the same keys more often, longer ones compute
    more scores outside the window.
    """
    left, right = (sum(lengths) if side < 0 else side for side in window)
    at_once = sum(lengths) if skips_keys else max(_QUERIES, window[0] + 1)
    parts = []
    for q_offset, mine in _with_local_offset(lengths, rank, size):
        for k_offset, theirs in _with_local_offset(lengths, source, size):
            if mine.first != theirs.first:
                continue
            end = min(mine.stop, theirs.stop + left)
            for q_start in range(max(mine.start, theirs.start - right), end, at_once):
                q_stop = min(q_start + at_once, end)
                k_start = max(theirs.start, q_start - left)
                k_stop = min(theirs.stop, q_stop + right)
                queries = slice(q_start + q_offset, q_stop + q_offset)
                keys = slice(k_start + k_offset, k_stop + k_offset)
                moved = left - (q_stop - k_stop), right + (q_stop - k_stop)
                parts.append((Block(queries, keys, is_causal=False), moved))
    return tuple(parts)


def _with_local_offset(
    lengths: tuple[int, ...], rank: int, size: int
) -> Iterator[tuple[int, Span]]:
    """Yield the spans of a rank, and what to add to a global index for its local one."""
    at = 0
    for span in held_spans(lengths, rank, size):
        yield at - span.start, span
        at += span.stop - span.start


_Values = tuple[RingPlan, list[SavedDropout]]  # one entry for each block


class _RingAttention(Function[Tensor]):
    """Saves local keys and values only; backward rotates them again instead of keeping all."""

    @staticmethod
    def forward(
        ctx: Context[_Values], q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: RingPlan
    ) -> Tensor:
        queries = _heads_first(q)
        out = torch.zeros_like(queries, dtype=wide(q))
        lse = out.new_full(out.shape[:-1], -math.inf)
        if sink is not None:
            lse.copy_(sink.unsqueeze(-1))
        kept: list[SavedDropout] = []
        for step, keys, values in _rotated(plan.ring, k, v):
            for block, call in plan.calls(queries, keys, values, step):
                part, part_lse, drawn = plan.kernel.forward(call)
                rows = block.queries
                merge_attention(out[:, :, rows], lse[:, :, rows], part, part_lse)
                kept.append(drawn)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.values = plan, kept
        return _tokens_first(out)

    @staticmethod
    def backward(ctx: Context[_Values], grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink = ctx.saved_tensors
        plan, drawn = ctx.values
        kept = iter(drawn)
        queries, grad = _heads_first(q), _heads_first(grad)
        grad_q = torch.zeros_like(queries, dtype=wide(q))
        going_home: Callable[[], Tensor] | None = None
        for step, keys, values in _rotated(plan.ring, k, v):
            grad_held = q.new_zeros(k.numel() + v.numel(), dtype=wide(q))
            grad_k, grad_v = (_heads_first(x) for x in _unpacked(grad_held, k, v))
            for block, call in plan.calls(queries, keys, values, step):
                rows = block.queries
                dq, dk, dv = plan.kernel.backward(
                    call, grad[:, :, rows], out[:, :, rows], lse[:, :, rows], next(kept)
                )
                grad_q[:, :, rows] += dq
                grad_k[:, :, block.keys] += dk
                grad_v[:, :, block.keys] += dv
            if going_home is not None:
                grad_held += going_home()
            going_home = plan.ring.shift(grad_held)
        assert going_home is not None, "a ring has ranks"
        grads = [g.to(k.dtype) for g in _unpacked(going_home(), k, v)]
        grad_sink = None
        if sink is not None:
            # With p = exp(sink - lse), its probability, the softmax gradient is
            # p * (0 - sum(grad * out)): the value of the sink is 0.
            along = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            grad_sink = -(torch.exp(sink.unsqueeze(-1) - lse) * along).sum((0, 2)).to(sink.dtype)
        return _tokens_first(grad_q).to(q.dtype), *grads, grad_sink, None


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a block's output to ``out`` in place, each side weighted by exp(own lse - common lse).

    ``out`` and ``part`` [b, n, q, d], ``lse`` and ``part_lse`` [b, n, q], the log-sum-exp of their
    scores: -inf without a key.  ``out`` and ``lse`` are in the dtype of the sums.
    """
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    safe = total.masked_fill(total == -math.inf, 0.0)  # no key yet: -inf - -inf would be NaN
    out.mul_(torch.exp(lse - safe).unsqueeze(-1))
    out.add_(part * torch.exp(part_lse - safe).unsqueeze(-1))
    lse.copy_(total)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, plan: RingPlan) -> Tensor:
    """Attend over the keys of all ranks: [s, b, n, d], 2 x [s, b, g, d] -> [s, b, n, d].

    The gradient of the sink [n] is the contribution of this rank's queries.  Collective over the
    ring, also in backward.
    """
    return _RingAttention.apply(query, key, value, plan.context.sink, plan)


def _rotated(ring: Ring, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the number of each step and the keys and values [b, g, s, d] that this rank then holds.

    Posts the next shift before the step and waits for it after the step.
    """
    held = torch.cat((k.reshape(-1), v.reshape(-1)))  # one send carries both
    for step in range(ring.size):
        arriving = ring.shift(held) if step + 1 < ring.size else None
        keys, values = (_heads_first(x) for x in _unpacked(held, k, v))
        yield step, keys, values
        held = held if arriving is None else arriving()


def _unpacked(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of ``message`` in the shapes of ``k`` and ``v``."""
    first, second = message.split((k.numel(), v.numel()))
    return first.view(k.shape), second.view(v.shape)


def _heads_first(x: Tensor) -> Tensor:
    """Return a view with heads before tokens: [s, b, n, d] -> [b, n, s, d]."""
    return x.permute(1, 2, 0, 3)


def _tokens_first(x: Tensor) -> Tensor:
    """Return a view with tokens first: [b, n, s, d] -> [s, b, n, d]."""
    return x.permute(2, 0, 1, 3)


class AttentionContext(NamedTuple):
    """The inputs of attention other than queries, keys and values."""

    is_causal: bool
    hidden: Tensor | None = None  # True where a key is hidden: [b or 1, n or 1, q or 1, k]
    bias: Tensor | None = None  # added to the scores: [1, n, q, k]
    packed: PackedSeqParams | None = None
    documents: PackedBounds | None = None  # of all rows; without context parallelism
    first_query: int | None = None  # its key position; None: the last query is at the last key
    sink: Tensor | None = None  # [n]: score of an extra key with value 0, for all queries

    def lengths(self, num_tokens: int) -> tuple[int, ...]:
        """Return the lengths of the sequences in a row of ``num_tokens`` on all ranks."""
        return row_lengths(None if self.packed is None else self.packed.lengths, num_tokens)

    def with_own_rows(self, num_rows: int, num_columns: int) -> AttentionContext:
        """Return the context with one mask row for each query of this rank.

        Raises ConfigError if a mask has another shape, or a bias requires a gradient.
        """
        hidden = self.hidden
        bias = self.bias
        if bias is not None and bias.requires_grad:
            raise ConfigError(
                "--context-parallel-size: an attention bias gets no gradient from other ranks; "
                "detach it, or use one rank for a sequence"
            )
        for x in (hidden, bias):
            if x is not None and (x.shape[-1] != num_columns or x.shape[-2] not in (1, num_rows)):
                raise ConfigError(
                    f"an attention mask or bias of {x.shape[-2]} x {x.shape[-1]}, and this "
                    f"context-parallel rank has {num_rows} of {num_columns} tokens: pass the rows "
                    "of its own tokens, as get_batch_on_this_cp_rank() shards them, and all columns"
                )
        if hidden is None:
            return self
        return self._replace(hidden=hidden.expand(*hidden.shape[:-2], num_rows, num_columns))


@dataclass(frozen=True, kw_only=True)
class ContextParallelComm:
    """The context-parallel communication of one layer.

    ``heads`` alone is a2a, ``ring`` alone p2p, both are a2a+p2p, none is allgather.  ``core`` is
    the layer's `DotProductAttention`.
    """

    cp: ProcessGroup
    heads: ProcessGroup | None  # group of the all-to-all between tokens and heads
    ring: ProcessGroup | None  # group of the ring of keys and values

    def attend(self, core: Any, qkv: QKV, context: AttentionContext) -> Tensor:
        """Attend over all ranks: [s, b, n, d], 2 x [s, b, g, d] -> [s, b, n d].

        Collective over cp, also in backward.
        """
        num_rows = len(qkv[0])
        num_tokens = num_rows * self.cp.size()
        lengths = context.lengths(num_tokens)
        context = context.with_own_rows(num_rows, num_tokens)
        out: Tensor
        if self.heads is None:
            if self.ring is None:
                return self._attend_to_all(core, qkv, context, lengths)
            out = core.attend_in_ring(qkv, context, Ring(self.ring))
            return out
        undo, qkv, context = _trade_heads(self.heads, self.cp, qkv, context, lengths)
        if self.ring is None:
            out = core.attend(qkv, context)
        else:
            out = core.attend_in_ring(qkv, context, Ring(self.ring))
        return tokens_for_heads(out, undo, self.heads)

    def _attend_to_all(
        self, core: Any, qkv: QKV, context: AttentionContext, lengths: tuple[int, ...]
    ) -> Tensor:
        """All-gather keys and values, then run attention for each contiguous chunk of queries.

        Each chunk gets only the keys of its own sequence, up to its last query if causal.
        """
        query, *both = qkv
        rank, size, device = self.cp.rank(), self.cp.size(), query.device
        order, _ = order_of_gathered(lengths, tuple(range(size)), size, device)
        key, value = (gather_from_sequence_parallel_region(x, group=self.cp)[order] for x in both)
        outputs, at = [], 0
        for span in held_spans(lengths, rank, size):
            rows = slice(at, at + span.stop - span.start)
            keys = slice(span.first, span.stop if context.is_causal else span.last)
            part = AttentionContext(
                is_causal=context.is_causal,
                hidden=None if context.hidden is None else context.hidden[..., rows, keys],
                bias=None if context.bias is None else context.bias[..., rows, keys],
                first_query=span.start - span.first,
                sink=context.sink,
            )
            outputs.append(core.attend((query[rows], key[keys], value[keys]), part))
            at = rows.stop
        return torch.cat(outputs)


def _trade_heads(
    heads: ProcessGroup,
    cp: ProcessGroup,
    qkv: QKV,
    context: AttentionContext,
    lengths: tuple[int, ...],
) -> tuple[Tensor, QKV, AttentionContext]:
    """All-to-all from local tokens of all heads to all tokens of a part of the heads.

    Returns the permutation that `tokens_for_heads` needs to undo it, then queries, keys and values
    in global token order, and ``context`` for them.  Collective over ``heads``.
    """
    query, key, value = qkv
    size, first = heads.size(), cp.rank() - heads.rank()  # the group is of consecutive cp ranks
    ranks = tuple(range(first, first + size))
    order, undo = order_of_gathered(lengths, ranks, cp.size(), query.device)
    # Grouped-query attention may have fewer key heads than ranks: repeat them until they divide
    # evenly, so that every rank receives the key heads of its query heads.
    times = size // gcd(key.shape[2], size)
    if times > 1:
        key, value = key.repeat_interleave(times, 2), value.repeat_interleave(times, 2)
    query, key, value = heads_for_tokens((query, key, value), order, heads)

    def rows_of_all(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = all_gather_first_dim(x.movedim(2, 0), heads)[order].movedim(0, 2)
        return x if x.shape[1] == 1 else x.chunk(size, 1)[heads.rank()]

    context = context._replace(
        hidden=rows_of_all(context.hidden),
        bias=rows_of_all(context.bias),
        sink=None if context.sink is None else context.sink.chunk(size)[heads.rank()],
    )
    return undo, (query, key, value), context


def heads_for_tokens(
    tensors: Sequence[Tensor], order: Tensor, heads: ProcessGroup
) -> tuple[Tensor, ...]:
    """All-to-all of several [s, b, n, d] -> [s c, b, n/c, d], tokens permuted by ``order``.

    The tensors may differ in n and d; they are concatenated, so that one all-to-all sends all of
    them.  Collective over ``heads``, also backward.
    """
    parts = [x.unflatten(2, (heads.size(), -1)).movedim(2, 0) for x in tensors]
    traded = all_to_all_first_dim(torch.cat([x.flatten(3) for x in parts], -1), heads)
    mixed = traded.flatten(0, 1)[order].split([x.shape[3] * x.shape[4] for x in parts], -1)
    return tuple(m.unflatten(-1, x.shape[3:]) for m, x in zip(mixed, parts, strict=True))


def tokens_for_heads(x: Tensor, undo: Tensor, heads: ProcessGroup) -> Tensor:
    """Undo `heads_for_tokens`: [s c, b, n/c d] -> [s, b, n d].  Collective, also backward."""
    traded = all_to_all_first_dim(x[undo].unflatten(0, (heads.size(), -1)), heads)
    return traded.movedim(0, 2).flatten(2)


def use_context_groups(model: nn.Module, groups: ProcessGroupCollection) -> None:
    """Let all layers of ``model`` share sequences over the ranks of ``groups.cp`` from now on.

    A backward pass keeps the group of its forward pass, but for layers that are recomputed.
    """
    for module in model.modules():
        held: Any = module
        if isinstance(getattr(module, "pg_collection", None), ProcessGroupCollection):
            held.pg_collection = groups
        if hasattr(module, "cp_group"):
            held.cp_group = groups.cp
        if hasattr(module, "cp_comm"):
            layer = held.layer_number - 1
            held.cp_comm = context_parallel_comm_of(held.config, layer, groups)


def comm_type_of_layer(config: ModelParallelConfig, layer_index: int) -> str:
    """Return --cp-comm-type of layer ``layer_index`` (from 0): one for all layers, or one each."""
    types = config.cp_comm_types
    return types[layer_index] if len(types) > 1 else types[0]


def context_parallel_comm_of(
    config: ModelParallelConfig,
    layer_index: int,
    groups: ProcessGroupCollection,
    kind: str | None = None,
) -> ContextParallelComm | None:
    """Return the communication of layer ``layer_index`` (from 0); None if cp has one rank.

    ``kind`` is by default the config's.
    """
    if groups.cp.size() == 1:
        return None
    kind = kind or comm_type_of_layer(config, layer_index)
    cp = groups.cp
    if kind not in COMM_TYPES:
        raise ConfigError(f"--cp-comm-type {kind} is not one of {', '.join(COMM_TYPES)}")
    heads, ring = cp if kind == "a2a" else None, cp if kind == "p2p" else None
    if kind == "a2a+p2p":
        levels = (groups.cp_inner, groups.cp_outer)
        heads, ring = (group if group.size() > 1 else None for group in levels)
    return ContextParallelComm(cp=cp, heads=heads, ring=ring)
