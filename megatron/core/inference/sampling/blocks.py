"""Logits with the maximum of each block of 32 columns, to find few large logits without a sort.

A block whose maximum is small has no large logit, so most searches read the maxima and then few
blocks.  The results are exact.  Shapes: ``r`` rows, ``v`` columns, ``n`` blocks, ``m`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.core.device import launches_kernels

BLOCK = 32


@dataclass(frozen=True)
class Blocks:
    """Rows ``rows`` [r] of ``logits`` [.., v], fp32, with ``maxima`` [r, n] of their blocks."""

    logits: Tensor
    rows: Tensor
    maxima: Tensor

    @staticmethod
    def of(logits: Tensor) -> Blocks:
        """Return all rows of ``logits``."""
        whole = logits.size(1) // BLOCK * BLOCK
        maxima = logits[:, :whole].unflatten(1, (-1, BLOCK)).amax(-1)
        if whole < logits.size(1):
            maxima = torch.cat([maxima, logits[:, whole:].amax(-1, keepdim=True)], dim=1)
        return Blocks(logits, torch.arange(len(logits), device=logits.device), maxima)

    def take(self, index: Tensor) -> Blocks:
        """Return the rows of ``index``; does not copy logits."""
        return Blocks(self.logits, self.rows[index], self.maxima.index_select(0, index))

    def tokens(self, blocks: Tensor) -> Tensor:
        """Return the columns [r, m, 32] of ``blocks`` [r, m]; in the last block up to v or more."""
        return blocks[..., None] * BLOCK + torch.arange(BLOCK, device=blocks.device)

    def values(self, blocks: Tensor) -> Tensor:
        """Return the logits [r, m, 32] of ``blocks`` [r, m]; -inf beyond the last column."""
        size = self.logits.size(1)
        tokens = self.tokens(blocks)
        values = self.logits[self.rows[:, None, None], tokens.clamp(max=size - 1)]
        return values.masked_fill_(tokens >= size, float("-inf")) if size % BLOCK else values

    def argmax(self) -> Tensor:
        """Return the column [r] of the largest logit: NaN if there is one, the first of equals."""
        block = self.maxima.argmax(-1, keepdim=True)
        return block[:, 0] * BLOCK + self.values(block)[:, 0].argmax(-1)

    def largest(self, count: int) -> Tensor:
        """Return the ``count`` largest logits [r, count] in descending order."""
        if count < self.maxima.size(1) // 2:
            candidates = self.values(self.maxima.topk(count).indices).flatten(1)
            return candidates.topk(count).values
        logits = self.logits.index_select(0, self.rows)
        if launches_kernels(logits.device):
            return logits.topk(count).values
        # numpy sorts values without their places, with vector instructions: 30 times as fast
        return torch.from_numpy(np.sort(logits.numpy())).flip(-1)[:, :count]

    def likeliest(self, count: int) -> Tensor:
        """Return the columns [r, count] of the ``count`` largest logits, best first.

        Of equal logits the first columns come first, whatever ``count`` is.
        """
        blocks = _first_of_largest(self.maxima, min(count, self.maxima.size(1))).sort().values
        candidates = self.values(blocks).flatten(1)
        found = self.tokens(blocks).flatten(1).gather(-1, _first_of_largest(candidates, count))
        return found.clamp(max=self.logits.size(1) - 1)  # where NaN is smaller than -inf


def _first_of_largest(values: Tensor, count: int) -> Tensor:
    """Return the columns of the ``count`` largest values, best and, of equals, first columns first.

    The keys of the search hold the value's bits, in an order in which they compare as integers,
    above the inverted column.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
    keys += torch.arange(values.size(1) - 1, -1, -1, device=values.device)
    return values.size(1) - 1 - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
