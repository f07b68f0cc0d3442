"""Which tokens of a sequence a context-parallel rank holds: the one place that knows.

A sequence is cut into 2 cp chunks, and rank i holds chunks i and 2 cp - 1 - i in this order: under
a causal mask all ranks have equal work.  Packed sequences are cut one by one.  ``lengths`` are the
global lengths of the sequences in a row of a micro-batch, one after the other; a *global* index
counts the tokens of that row, a *local* one those that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm

import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError


def local_sequence_length(
    seq_length: int, *, cp: int = 1, tp: int = 1, sequence_parallel: bool = False
) -> int:
    """Tokens of a sequence in the hidden states of one rank, between the layers."""
    return seq_length // (cp * tp if sequence_parallel else cp)


def sequence_divisor(*, cp: int = 1, tp: int = 1, sequence_parallel: bool = False) -> int:
    """What the length of a sequence must be a multiple of: two chunks for each rank of cp, of which
    each rank of tp takes an even share under sequence parallelism."""
    return cp * lcm(2 if cp > 1 else 1, tp if sequence_parallel else 1)


@dataclass(frozen=True)
class Span:
    """Tokens ``start .. stop`` (global) of the sequence that lies in ``first .. last``."""

    start: int
    stop: int
    first: int
    last: int


@lru_cache(maxsize=64)
def held_spans(lengths: tuple[int, ...], rank: int, size: int) -> tuple[Span, ...]:
    """The spans that ``rank`` of ``size`` holds, in local order.

    Raises ConfigError where a packed sequence cannot be cut evenly.
    """
    spans, first = [], 0
    for length in lengths:
        last = first + length
        if size == 1:
            spans.append(Span(first, last, first, last))
        elif length % (2 * size):
            raise ConfigError(
                f"--context-parallel-size {size}: a sequence of {length} tokens cannot be cut into "
                f"2 x {size} chunks; pad each packed sequence to a multiple of {2 * size}"
            )
        else:
            chunk = length // (2 * size)
            starts = (first + chunk * i for i in (rank, 2 * size - 1 - rank))
            spans += [Span(start, start + chunk, first, last) for start in starts]
        first = last
    return tuple(spans)


@lru_cache(maxsize=64)
def held_tokens(
    lengths: tuple[int, ...], rank: int, size: int, device: torch.device | None = None
) -> Tensor:
    """Global index of each local token: [s/cp]."""
    spans = held_spans(lengths, rank, size)
    return torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])


@lru_cache(maxsize=64)
def order_of_gathered(
    lengths: tuple[int, ...], ranks: tuple[int, ...], size: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """How to sort what ``ranks`` hold, one behind the other, by global index, and how to undo it.

    ``gathered[order]`` is sorted; ``sorted[undo]`` is as gathered.
    """
    order = torch.cat([held_tokens(lengths, r, size, device) for r in ranks]).argsort()
    return order, order.argsort()


@lru_cache(maxsize=64)
def sequence_ends(lengths: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Where the sequence of each token of a row ends: [s]."""
    ends = zip(lengths, accumulate(lengths), strict=True)
    return torch.cat([torch.full((length,), end, device=device) for length, end in ends])


@dataclass(frozen=True)
class Block:
    """Local queries of one rank that meet local keys of another, all or those not after them."""

    queries: slice
    keys: slice
    is_causal: bool


@lru_cache(maxsize=256)
def blocks_of(
    lengths: tuple[int, ...], rank: int, source: int, size: int, is_causal: bool
) -> tuple[Block, ...]:
    """What ``rank`` computes with the keys of ``source``: a block for each sequence.

    Under causality a rank needs only the first chunk of an earlier rank, and for a later one only
    its second chunk needs the keys.
    """
    blocks, start = [], 0
    for length in lengths:
        stop = start + length // size
        middle = (start + stop) // 2
        queries = slice(middle if is_causal and source > rank else start, stop)
        keys = slice(start, middle if is_causal and source < rank else stop)
        blocks.append(Block(queries, keys, is_causal and source == rank))
        start = stop
    return tuple(blocks)


def row_lengths(packed: Sequence[int] | None, num_tokens: int) -> tuple[int, ...]:
    """Lengths of the sequences in a row of ``num_tokens``: one, or those packed into it.

    Raises ConfigError unless they fill it.
    """
    if packed is None:
        return (num_tokens,)
    if sum(packed) != num_tokens:
        raise ConfigError(
            f"cu_seqlens describe {sum(packed)} tokens and the ranks of a context-parallel group "
            f"hold {num_tokens}: each rank is handed its share of the tokens and the whole "
            "cu_seqlens"
        )
    return tuple(packed)
