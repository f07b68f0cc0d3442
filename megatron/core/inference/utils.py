"""Small helpers of Megatron-LM's inference package."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core import device


class Counter:
    """Count from ``start``: each `next` returns the next number."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        number = self.counter
        self.counter += 1
        return number

    def reset(self) -> None:
        """Begin again at 0."""
        self.counter = 0


def get_attention_mask(seq_length: int) -> Tensor:
    """Return the causal mask [1, 1, s, s], True where a key is hidden."""
    shape = (1, 1, seq_length, seq_length)
    return torch.ones(shape, dtype=torch.bool, device=device.current()).triu(diagonal=1)
