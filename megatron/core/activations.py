"""Activation functions of the MLP that torch does not provide as functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)^2."""
    return F.relu(x).square()


def openai_gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


fast_gelu = openai_gelu


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x), an approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)
