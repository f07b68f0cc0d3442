"""Dropout masks as a function of a seed and of the position of a value: nothing is saved.

The seed has 8 bytes and torch's generator draws it on the device.  So ranks that hold the same
tensor drop the same values under any active random stream, and recomputation repeats the mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SEEDS = 2**62


def draw_seed(prob: float, like: Tensor) -> Tensor | None:
    """Draw the seed of one mask on the device of ``like``; None if nothing is dropped."""
    return torch.randint(_SEEDS, (1,), device=like.device) if prob else None


@triton.jit
def stays(Seed, first, prob, BLOCK: tl.constexpr):
    """Return the mask of BLOCK values: four per Philox draw, the first draw is number ``first``."""
    # Counters of 32 bits: four values each serve 2^34 values.
    counter = first + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.rand4x(tl.load(Seed), counter)
    draws = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(draws, (BLOCK,)) >= prob
