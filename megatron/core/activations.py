"""Activation functions of the MLP that torch has no name for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2"""
    return F.relu(x).square()


def openai_gelu(x: Tensor) -> Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


fast_gelu = openai_gelu


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)"""
    return x * torch.sigmoid(1.702 * x)
