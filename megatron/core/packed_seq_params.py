"""Where sequences begin and end in a micro-batch of one row that holds several."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class PackedSeqParams:
    """Cumulative lengths [n + 1], starting with 0; a ``_padded`` one counts padding between."""

    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence with its padding, in a row of all context-parallel ranks.

        Read from the device once.
        """
        ends = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        assert ends is not None, "packed sequences come with cu_seqlens_q"
        return tuple(n for n in ends.diff().tolist() if n > 0)


def sequence_index(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Which sequence each of ``num_tokens`` tokens belongs to: [0, 3, 5] -> 0 0 0 1 1."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1


def position_in_sequence(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Position of each token in its own sequence: [0, 3, 5] -> 0 1 2 0 1."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    return tokens - cu_seqlens.to(tokens.dtype)[sequence_index(cu_seqlens, num_tokens)]
