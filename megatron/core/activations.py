"""Activation functions that torch has no name for."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """``max(x, 0)`` squared."""
    return F.relu(x).square()


def openai_gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, as the first GPT models have it."""
    return F.gelu(x, approximate="tanh")
