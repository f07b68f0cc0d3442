"""act(gate) * up and act(x + bias) for any activation; only the input is saved for backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import openai_gelu, quick_gelu, squared_relu
from megatron.core.autograd import Context, Function
from megatron.core.device import cpu_kernels
from megatron.core.fusions import kernels
from megatron.core.fusions.cpu import ops

Activation = Callable[[Tensor], Tensor]
_FUSED: dict[Activation, str] = {
    F.silu: "silu",
    F.gelu: "gelu",
    openai_gelu: "openai_gelu",
    quick_gelu: "quick_gelu",
    squared_relu: "squared_relu",
}


def glu_reference(
    gate_up: Tensor, act: Activation, clamp: float | None = None, offset: float = 0.0
) -> Tensor:
    """Compute [..., 2 f] -> [..., f] in plain torch.

    ``clamp`` bounds the gate from above and up on both sides; ``offset`` is added to up.
    """
    gate, up = gate_up.chunk(2, -1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return act(gate) * (up + offset if offset else up)


_How = tuple[Activation, float | None, float]  # the arguments of `glu_reference` after gate_up


class _GLU(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_How], gate_up: Tensor, act: Activation, clamp: float | None, offset: float
    ) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.values = act, clamp, offset
        return glu_reference(gate_up, act, clamp, offset)

    @staticmethod
    def backward(ctx: Context[_How], grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            gate_up = ctx.saved_tensors[0].detach().requires_grad_()
            y = glu_reference(gate_up, *ctx.values)
        return *torch.autograd.grad(y, gate_up, grad), None, None, None


def glu(
    gate_up: Tensor,
    act: Activation,
    clamp: float | None = None,
    offset: float = 0.0,
    weights: Tensor | None = None,
    *,
    fused: bool = True,
) -> Tensor:
    """Compute [..., 2 f] -> [..., f]; weights [...] multiply the rows, if given."""
    found = kernels.find("glu", gate_up, weights) if fused and act in _FUSED else None
    y: Tensor
    if found and gate_up.is_contiguous():
        y = found.glu(gate_up, _FUSED[act], clamp, offset, weights)
        return y
    y = _GLU.apply(gate_up, act, clamp, offset)
    return y if weights is None else weighed(y, weights)


def weighed(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply the rows of ``x`` [..., f] by ``weights`` [...], in the dtype of ``x``."""
    return (x * weights.unsqueeze(-1)).to(x.dtype)


def adds_bias(act: Activation, like: Tensor) -> bool:
    """Return whether `activation` adds a bias to tensors such as ``like`` in the same kernel."""
    return act in _FUSED and kernels.is_available("bias_activation", like)


def activation(x: Tensor, act: Activation, bias: Tensor | None = None) -> Tensor:
    """Compute act(x), or act(x + bias); on a GPU torch's own kernels of act(x) are as fast."""
    if bias is not None:
        found = kernels.find("bias_activation", x, bias) if act in _FUSED else None
        if found and x.is_contiguous():
            y: Tensor = found.bias_activation(x, bias, _FUSED[act])
            return y
        return act(x + bias)
    if act in _FUSED and x.is_contiguous() and cpu_kernels.take(x):
        return ops.activation(x, _FUSED[act])
    return act(x)
