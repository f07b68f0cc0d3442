"""Context parallelism: the communication of --cp-comm-type around an attention core.

``s`` local tokens, ``c`` context-parallel ranks, ``b`` sequences, ``n`` query heads, ``g``
key/value heads, ``d`` head width, all after tensor parallelism.

    p2p        each rank sends its keys and values around a ring (context_parallel_ring.py)
    a2a        all-to-all from tokens to heads: [s, b, n, d] -> [s c, b, n/c, d], and back
    allgather  keys and values are all-gathered; their gradients are reduce-scattered
    a2a+p2p    all-to-all within groups of neighbouring ranks, a ring across these groups

Ranks hold two chunks each of a causal sequence, so the tokens of gathered tensors are not in global
order; `order_of_gathered` restores it.  Masks and biases have one row per local query and one
column per key of the complete sequence, in global order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.config.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.packed_seq_params import PackedBounds, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import (
    held_spans,
    order_of_gathered,
    row_lengths,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_gather_first_dim,
    all_to_all_first_dim,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.context_parallel_ring import Ring

_QKV = tuple[Tensor, Tensor, Tensor]
COMM_TYPES = ("p2p", "a2a", "allgather", "a2a+p2p")


class AttentionContext(NamedTuple):
    """The inputs of attention other than queries, keys and values."""

    is_causal: bool
    hidden: Tensor | None = None  # True where a key is hidden: [b or 1, n or 1, q or 1, k]
    bias: Tensor | None = None  # added to the scores: [1, n, q, k]
    packed: PackedSeqParams | None = None
    documents: PackedBounds | None = None  # of all rows; without context parallelism
    first_query: int | None = None  # its key position; None: the last query is at the last key
    sink: Tensor | None = None  # [n]: score of an extra key with value 0, for all queries


class Core(Protocol):
    """The interface of an attention core that `ContextParallelComm` calls."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
    ) -> Tensor:
        """Attend on this rank alone: [q, b, n, d], 2 x [k, b, g, d] -> [q, b, n d]."""

    def attend_in_ring(
        self, qkv: _QKV, context: AttentionContext, ring: Ring, lengths: tuple[int, ...]
    ) -> Tensor:
        """Attend to the keys and values of all ranks of the ring; shapes as in `attend`.

        ``lengths``: lengths of the sequences in a row, over all ranks.  Collective over the ring.
        """


@dataclass(frozen=True, kw_only=True)
class ContextParallelComm:
    """The context-parallel communication of one layer.

    ``heads`` alone is a2a, ``ring`` alone p2p, both are a2a+p2p, none is allgather.
    """

    cp: ProcessGroup
    heads: ProcessGroup | None  # group of the all-to-all between tokens and heads
    ring: ProcessGroup | None  # group of the ring of keys and values

    def attend(
        self, core: Core, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
    ) -> Tensor:
        """Attend over all ranks: [s, b, n, d], 2 x [s, b, g, d] -> [s, b, n d].

        Collective over cp, also in backward.
        """
        num_tokens = query.shape[0] * self.cp.size()
        lengths = row_lengths(context.packed.lengths if context.packed else None, num_tokens)
        context = _with_own_rows(context, query.shape[0], num_tokens)
        qkv = (query, key, value)
        if self.heads is None:
            if self.ring is None:
                return self._attend_to_all(core, qkv, context, lengths)
            return core.attend_in_ring(qkv, context, Ring(self.ring), lengths)
        undo, qkv, context = _trade_heads(self.heads, self.cp, qkv, context, lengths)
        if self.ring is None:
            out = core.attend(*qkv, context)
        else:
            out = core.attend_in_ring(qkv, context, Ring(self.ring), lengths)
        return tokens_for_heads(out, undo, self.heads)

    def _attend_to_all(
        self, core: Core, qkv: _QKV, context: AttentionContext, lengths: tuple[int, ...]
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
            outputs.append(core.attend(query[rows], key[keys], value[keys], part))
            at = rows.stop
        return torch.cat(outputs)


def attend_alone(
    core: Core, query: Tensor, key: Tensor, value: Tensor, context: AttentionContext
) -> Tensor:
    """Run the ring of one rank on the complete sequence.

    Attention with a sink uses it: only block kernels return the log-sum-exp that a sink changes.
    """
    num_tokens = query.shape[0]
    lengths = row_lengths(context.packed.lengths if context.packed else None, num_tokens)
    context = _with_own_rows(context, num_tokens, num_tokens)
    return core.attend_in_ring((query, key, value), context, Ring(None), lengths)


def _trade_heads(
    heads: ProcessGroup,
    cp: ProcessGroup,
    qkv: _QKV,
    context: AttentionContext,
    lengths: tuple[int, ...],
) -> tuple[Tensor, _QKV, AttentionContext]:
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
    widths = [x.shape[3] * x.shape[4] for x in parts]
    mixed = traded.flatten(0, 1)[order].split(widths, -1)
    return tuple(m.unflatten(-1, x.shape[3:]) for m, x in zip(mixed, parts, strict=True))


def tokens_for_heads(x: Tensor, undo: Tensor, heads: ProcessGroup) -> Tensor:
    """Undo `heads_for_tokens`: [s c, b, n/c d] -> [s, b, n d].  Collective, also backward."""
    traded = all_to_all_first_dim(x[undo].unflatten(0, (heads.size(), -1)), heads)
    return traded.movedim(0, 2).flatten(2)


def comm_type_of_layer(config: ModelParallelConfig, layer_index: int) -> str:
    """Return --cp-comm-type of layer ``layer_index`` (from 0): one for all layers, or one each."""
    types = config.cp_comm_type
    if isinstance(types, str):  # a script may set a string instead of a list
        return types
    return types[layer_index] if len(types) > 1 else types[0]


def context_parallel_comm_of(
    config: ModelParallelConfig, layer_index: int, groups: ProcessGroupCollection | None
) -> ContextParallelComm | None:
    """Return the communication of layer ``layer_index`` (from 0); None if cp has one rank."""
    if groups is None or groups.cp.size() == 1:
        return None
    kind, cp = comm_type_of_layer(config, layer_index), groups.cp
    if kind not in COMM_TYPES:
        raise ConfigError(f"--cp-comm-type {kind} is not one of {', '.join(COMM_TYPES)}")
    heads, ring = cp if kind == "a2a" else None, cp if kind == "p2p" else None
    if kind == "a2a+p2p":
        levels = (groups.cp_inner, groups.cp_outer)
        heads, ring = (group if group.size() > 1 else None for group in levels)
    return ContextParallelComm(cp=cp, heads=heads, ring=ring)


def _with_own_rows(context: AttentionContext, num_rows: int, num_columns: int) -> AttentionContext:
    """Return ``context`` with one mask row for each query of this rank.

    Raises ConfigError if a mask has another shape, or a bias requires a gradient.
    """
    hidden, bias = context.hidden, context.bias
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
    if hidden is None or hidden.shape[-2] == num_rows:
        return context
    return context._replace(hidden=hidden.expand(*hidden.shape[:-2], num_rows, num_columns))
