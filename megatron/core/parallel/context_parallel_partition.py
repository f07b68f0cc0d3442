"""Context-parallel partition of a sequence: which token positions each rank holds.

A sequence is split into 2 cp chunks, and rank i holds chunks i and 2 cp - 1 - i in this order:
under a causal mask all ranks have equal work.  Packed sequences are split one by one.  ``lengths``
are the global lengths of the sequences that a row of a micro-batch concatenates.  A *global* index
counts the tokens of that row, a *local* index the tokens of the row that one rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError


def sequence_divisor(*, cp: int = 1, tp: int = 1, sequence_parallel: bool = False) -> int:
    """Return the number that must divide the length of a sequence.

    Each rank of cp holds two chunks of equal length; under sequence parallelism tp splits its
    tokens evenly.
    """
    return cp * lcm(2 if cp > 1 else 1, tp if sequence_parallel else 1)


@dataclass(frozen=True)
class Span:
    """Tokens ``start .. stop`` of the sequence ``first .. last``, in global indices."""

    start: int
    stop: int
    first: int
    last: int


@lru_cache(maxsize=64)
def held_spans(lengths: tuple[int, ...], rank: int, size: int) -> tuple[Span, ...]:
    """Return the spans that ``rank`` of ``size`` holds, in local order.

    Raises ConfigError if a packed sequence cannot be split evenly.
    """
    spans = []
    first = 0
    for length in lengths:
        last = first + length
        if size == 1:
            spans.append(Span(first, last, first, last))
        elif length % (2 * size):
            raise ConfigError(
                f"--context-parallel-size {size}: a sequence of {length} tokens cannot be split "
                f"into 2 x {size} chunks; pad each packed sequence to a multiple of {2 * size}"
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
    """Return the global index of each local token: [s/cp]."""
    spans = held_spans(lengths, rank, size)
    return torch.cat([torch.arange(s.start, s.stop, device=device) for s in spans])


@lru_cache(maxsize=64)
def order_of_gathered(
    lengths: tuple[int, ...], ranks: tuple[int, ...], size: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return the permutation (order, undo) between gathered and global order of tokens.

    ``gathered`` concatenates the local tokens of ``ranks``.  ``gathered[order]`` is sorted by
    global index; ``gathered[order][undo]`` is ``gathered`` again.
    """
    order = torch.cat([held_tokens(lengths, r, size, device) for r in ranks]).argsort()
    return order, order.argsort()


def undo_load_balancing(input_: Tensor, cp_size: int, packed_seq_params: Any = None) -> Tensor:
    """Return the tokens [s, ...] of all ranks, concatenated by rank, in their global order."""
    packed = None if packed_seq_params is None else packed_seq_params.lengths
    lengths = row_lengths(packed, len(input_))
    order, _ = order_of_gathered(lengths, tuple(range(cp_size)), cp_size, input_.device)
    return input_.index_select(0, order)


@lru_cache(maxsize=64)
def sequence_ends(lengths: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """Return, for each token of a row, the global index at which its sequence ends: [s]."""
    ends = zip(lengths, accumulate(lengths), strict=True)
    return torch.cat([torch.full((length,), end, device=device) for length, end in ends])


@dataclass(frozen=True)
class Block:
    """Block of attention scores: local queries of one rank times local keys of another.

    ``is_causal``: a query attends only to keys at or before its own position in the block.
    """

    queries: slice
    keys: slice
    is_causal: bool


@lru_cache(maxsize=256)
def blocks_of(
    lengths: tuple[int, ...], rank: int, source: int, size: int, is_causal: bool
) -> tuple[Block, ...]:
    """Return the blocks that ``rank`` computes with the keys of ``source``, one per sequence.

    Under a causal mask, the queries of ``rank`` attend only to the first chunk of an earlier rank;
    to the keys of a later rank, only the queries of its second chunk attend.
    """
    blocks = []
    start = 0
    for length in lengths:
        stop = start + length // size
        middle = (start + stop) // 2
        queries = slice(middle if is_causal and source > rank else start, stop)
        keys = slice(start, middle if is_causal and source < rank else stop)
        blocks.append(Block(queries, keys, is_causal and source == rank))
        start = stop
    return tuple(blocks)


def row_lengths(packed: Sequence[int] | None, num_tokens: int) -> tuple[int, ...]:
    """Return the lengths of the sequences in a row of ``num_tokens``; ``packed`` None: one.

    Raises ConfigError unless the lengths of ``packed`` sum to ``num_tokens``.
    """
    if packed is None:
        return (num_tokens,)
    if sum(packed) != num_tokens:
        raise ConfigError(
            f"cu_seqlens describe {sum(packed)} tokens and the ranks of a context-parallel group "
            f"hold {num_tokens}: pass each rank its share of the tokens and all "
            "cu_seqlens"
        )
    return tuple(packed)
