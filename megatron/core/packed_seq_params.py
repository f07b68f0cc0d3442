"""Where sequences begin and end in a micro-batch of one row that holds several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class PackedSeqParams:
    """Cumulative lengths [n + 1], starting with 0; a ``_padded`` one counts padding between.

    They are those of a whole row, also where context-parallel ranks hold a share of it each.
    """

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    @property
    def ends(self) -> Tensor:
        """Where the sequences of the row begin and end, padding included: [n + 1]."""
        ends = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        assert ends is not None, "packed sequences come with cu_seqlens_q"
        return ends

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, padding included.  Read from the device once."""
        return tuple(n for n in self.ends.diff().tolist() if n > 0)

    def is_padding(self, num_tokens: int) -> Tensor | None:
        """True for tokens between sequences: [num_tokens]; None where there are none."""
        if self.cu_seqlens_q is None or self.cu_seqlens_q_padded is None:
            return None
        lengths = self.cu_seqlens_q.diff()
        index = sequence_index(self.ends, num_tokens).clamp(max=len(lengths) - 1)
        return position_in_sequence(self.ends, num_tokens) >= lengths[index]


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Which sequence each of ``num_tokens`` tokens belongs to: [0, 3, 5] -> 0 0 0 1 1."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1


def position_in_sequence(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Position of each token in its own sequence: [0, 3, 5] -> 0 1 2 0 1."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return tokens - cu_seqlens.to(tokens.dtype)[sequence_index(cu_seqlens, num_tokens)]
