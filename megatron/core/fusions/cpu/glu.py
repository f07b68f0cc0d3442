"""act(gate) * (up + offset) * weight, and activations alone: one read and one write each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.device import cpu_kernels


def glu(
    gate_up: Tensor, act: str, clamp: float | None, offset: float, weights: Tensor | None
) -> Tensor:
    """[..., 2 f], contiguous, and [...] -> [..., f]."""
    bound = float("inf") if clamp is None else clamp
    return _GLU.apply(gate_up, weights, act, (bound, offset))


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weights: Tensor | None, act: str, numbers: tuple[float, float]
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.act, ctx.numbers = act, numbers
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _run_rows(f"{act}_glu", out, [gate_up, out, _in_float(weights)], numbers)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights = ctx.saved_tensors
        out, dense = torch.empty_like(gate_up), _in_float(weights)
        of_weights = None if dense is None else torch.empty_like(dense)
        tensors = [gate_up, grad.contiguous(), out, dense, of_weights]
        _run_rows(f"{ctx.act}_glu_backward", grad, tensors, ctx.numbers)
        if of_weights is not None:
            of_weights = of_weights.to(weights.dtype)
        return out, of_weights, None, None


def _in_float(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.float().contiguous()


def _run_rows(
    kernel: str, like: Tensor, tensors: list[Tensor | None], numbers: tuple[float, float]
) -> None:
    """Over the rows of ``like`` [..., f]."""
    width = max(1, like.shape[-1])
    cpu_kernels.run(
        kernel,
        tensors,
        format=like.dtype,
        sizes=(width,),
        numbers=numbers,
        count=like.numel() // width,
        width=width,
    )


def activation(x: Tensor, act: str) -> Tensor:
    """[...], contiguous -> [...]"""
    return _Activation.apply(x, act)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.act, out = act, torch.empty_like(x)
        cpu_kernels.run(act, [x, out], format=x.dtype, count=x.numel())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        tensors = [x, grad.contiguous(), out]
        cpu_kernels.run(f"{ctx.act}_backward", tensors, format=x.dtype, count=x.numel())
        return out, None
