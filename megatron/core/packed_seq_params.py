"""Boundaries of packed sequences and documents: several in one row of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedBounds(NamedTuple):
    """Bounds of sequences or documents in all rows of a micro-batch, concatenated.

    ``cumulative``: int32 [number of sequences + 1], from 0 to the number of tokens; attention
    kernels write no output for a token after the last bound.  ``longest``: upper bound of a
    sequence's length; kernels start a thread block for each 128 tokens of it per sequence.
    """

    cumulative: Tensor
    longest: int

    @classmethod
    def of_documents(cls, is_end: Tensor) -> PackedBounds:
        """Return the bounds of the documents of a row: bool [s], True at the last token of each."""
        inner = is_end[:-1].nonzero().flatten() + 1
        cumulative = torch.cat([inner.new_zeros(1), inner, inner.new_tensor([len(is_end)])]).int()
        return cls(cumulative, int(cumulative.diff().max()))

    @classmethod
    def of_rows(cls, rows: Sequence[PackedBounds]) -> PackedBounds:
        """Return the bounds of ``rows`` as those of one concatenated row."""
        stops = [rows[0].cumulative[:1]]
        tokens = 0
        for row in rows:
            stops.append(row.cumulative[1:] + tokens)
            tokens += int(row.cumulative[-1])
        return cls(torch.cat(stops), max(row.longest for row in rows))

    def hidden(self, num_rows: int, num_tokens: int) -> Tensor:
        """Return the mask [b, 1, s, s], True where a key is in another document than the query."""
        index = sequence_index(self.cumulative, num_rows * num_tokens).view(num_rows, num_tokens)
        return (index.unsqueeze(2) != index.unsqueeze(1)).unsqueeze(1)


# What callers of a model pass as attention_mask: True where a key is hidden, or for causal models
# the bounds of documents that do not attend to each other.
AttentionMask = Tensor | PackedBounds


@dataclass
class PackedSeqParams:
    """Cumulative lengths of the n sequences in a row: int tensors [n + 1] that start with 0.

    The ``_padded`` fields include the padding between sequences.  All fields describe the complete
    row, also if context parallelism shards it.
    """

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    # Upper bound of the lengths of all sequences of the row, none of whose tokens follows the last.
    _bounded_length: int | None = field(default=None, repr=False)

    @classmethod
    def of_bounds(cls, bounds: PackedBounds, lengths: Sequence[int] = ()) -> PackedSeqParams:
        """Return the sequences that ``bounds`` describe, as those of one row.

        ``lengths``: their lengths, where the host knows them and the device has no values.
        """
        found = cls(
            qkv_format="thd",
            cu_seqlens_q=bounds.cumulative,
            cu_seqlens_kv=bounds.cumulative,
            max_seqlen_q=bounds.longest,
            max_seqlen_kv=bounds.longest,
            _bounded_length=bounds.longest,
        )
        if lengths:
            found.lengths = tuple(lengths)
        return found

    @property
    def ends(self) -> Tensor:
        """Boundaries of the sequences of the row, including padding: [n + 1]."""
        ends = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        assert ends is not None, "packed sequences come with cu_seqlens_q"
        return ends

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence, including padding.

        The first access synchronizes with the device.
        """
        return tuple(n for n in self.ends.diff().tolist() if n > 0)

    def kernel_bounds(self, num_tokens: int, num_rows: int) -> Tensor:
        """Return the bounds of all sequences of ``num_rows`` equal rows, concatenated, for kernels.

        int32 from 0 to num_rows * num_tokens: tokens after a row's last sequence count as one more
        sequence.  Computed on the device of the lengths in the first call, without a wait.
        """
        known = self._known_bounds
        if (num_tokens, num_rows) not in known:
            stops = F.pad(self.ends[1:].to(torch.int32), (0, 1), value=num_tokens)
            starts = num_tokens * torch.arange(num_rows, dtype=torch.int32, device=stops.device)
            stops = (starts.unsqueeze(1) + stops).flatten()
            known[num_tokens, num_rows] = F.pad(stops, (1, 0))
        return known[num_tokens, num_rows]

    @cached_property
    def _known_bounds(self) -> dict[tuple[int, int], Tensor]:
        return {}

    def longest(self, num_tokens: int) -> int:
        """Return an upper bound of a sequence's length, without a wait for the device.

        Exact if `lengths` is known already.
        """
        if "lengths" in self.__dict__:
            return max((*self.lengths, num_tokens - sum(self.lengths)))
        return num_tokens if self._bounded_length is None else self._bounded_length

    def is_padding(self, num_tokens: int) -> Tensor | None:
        """Return a mask [num_tokens], True for padding; None if no padding is described."""
        if self.cu_seqlens_q is None or self.cu_seqlens_q_padded is None:
            return None
        lengths = self.cu_seqlens_q.diff()
        index = sequence_index(self.ends, num_tokens).clamp(max=len(lengths) - 1)
        return position_in_sequence(self.ends, num_tokens) >= lengths[index]


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the index of each token's sequence: [0, 3, 5] and 5 tokens -> 0 0 0 1 1."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1


def position_in_sequence(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return each token's position in its sequence: [0, 3, 5] and 5 tokens -> 0 1 2 0 1."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return tokens - cu_seqlens.to(tokens.dtype)[sequence_index(cu_seqlens, num_tokens)]
