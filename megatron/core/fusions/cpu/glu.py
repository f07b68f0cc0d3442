"""act(gate) * (up + offset) * weight, and plain activations: one read and one write per pass."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.device import cpu_kernels


def glu(
    gate_up: Tensor, act: str, clamp: float | None, offset: float, weights: Tensor | None
) -> Tensor:
    """Compute [..., 2 f], contiguous, and weights [...] -> [..., f]."""
    bound = float("inf") if clamp is None else clamp
    return _GLU.apply(gate_up, weights, act, (bound, offset))


_Numbers = tuple[float, float]  # the bound of clamping and the offset


class _GLU(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[tuple[str, _Numbers]],
        gate_up: Tensor,
        weights: Tensor | None,
        act: str,
        numbers: _Numbers,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.values = act, numbers
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _run_rows(f"{act}_glu", out, [gate_up, out, _in_float(weights)], numbers)
        return out

    @staticmethod
    def backward(ctx: Context[tuple[str, _Numbers]], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights = ctx.saved_tensors
        act, numbers = ctx.values
        out, dense = torch.empty_like(gate_up), _in_float(weights)
        of_weights = None if dense is None else torch.empty_like(dense)
        tensors = [gate_up, grad.contiguous(), out, dense, of_weights]
        _run_rows(f"{act}_glu_backward", grad, tensors, numbers)
        if of_weights is not None:
            of_weights = of_weights.to(weights.dtype)
        return out, of_weights, None, None


def _in_float(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.float().contiguous()


def _run_rows(kernel: str, like: Tensor, tensors: list[Tensor | None], numbers: _Numbers) -> None:
    """Run a kernel over the rows of ``like`` [..., f]."""
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
    """Compute the activation of a contiguous tensor."""
    return _Activation.apply(x, act) if torch.is_grad_enabled() else _activate(x, act)


def _activate(x: Tensor, act: str) -> Tensor:
    out = torch.empty_like(x)
    cpu_kernels.run(act, [x, out], format=x.dtype, count=x.numel())
    return out


class _Activation(Function[Tensor]):
    @staticmethod
    def forward(ctx: Context[str], x: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.values = act
        return _activate(x, act)

    @staticmethod
    def backward(ctx: Context[str], grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        tensors = [x, grad.contiguous(), out]
        cpu_kernels.run(f"{ctx.values}_backward", tensors, format=x.dtype, count=x.numel())
        return out, None
