"""silu(gate) * up, keeping nothing but its input for backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f] in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]"""
    return _SwiGLU.apply(gate_up)
