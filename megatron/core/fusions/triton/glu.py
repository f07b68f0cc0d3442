"""act(gate) * (up + offset) * weight: m rows of 2 f -> m rows of f in one read and one write.

Forward moves 3 m f values and backward 5; plain torch moves 5 and 13 for SwiGLU, and several times
that with a clamp, an offset or weights.  One program handles one row, so the gradient of a weight
is summed in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions.triton.launch import launch, power_of_2

_BLOCK, _WARPS = 1024, 4  # 8 elements a thread: one load of 16 bytes in bf16


def glu(
    gate_up: Tensor, act: str, clamp: float | None, offset: float, weights: Tensor | None
) -> Tensor:
    """Map [..., 2 f], contiguous, and weights [...] to [..., f].

    ``act`` is a case of `act_and_slope`.
    """
    return _GLU.call(gate_up, weights, act, clamp, offset)


class _Launch(NamedTuple):
    rows: int
    numbers: tuple[object, ...]  # width, clamp, offset, and the constants of the kernels


class _GLU(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Context[_Launch],
        gate_up: Tensor,
        weights: Tensor | None,
        act: str,
        clamp: float | None,
        offset: float,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        rows = out.numel() // width
        block = max(128, min(_BLOCK, power_of_2(width)))
        numbers = width, clamp or 0.0, offset, act, clamp is not None, block
        ctx.values = _Launch(rows, numbers)
        if rows:
            dense = None if weights is None else weights.contiguous()
            launch(_forward, (rows,), (gate_up, dense, out), numbers, _WARPS)
        return out

    @staticmethod
    def backward(ctx: Context[_Launch], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights = ctx.saved_tensors
        rows, numbers = ctx.values
        out, of_weights, dense = torch.empty_like(gate_up), None, None
        if weights is not None:
            dense = weights.contiguous()
            of_weights = torch.empty_like(dense)
        if rows:
            tensors = gate_up, dense, grad.contiguous(), out, of_weights
            launch(_backward, (rows,), tensors, numbers, _WARPS)
        return out, of_weights, None, None, None


@triton.jit
def act_and_slope(x, ACT: tl.constexpr):
    """Return an activation and its derivative."""
    if ACT == "silu":
        s = tl.sigmoid(x)
        y, slope = x * s, s * (1 + x * (1 - s))
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        y, slope = x * s, s * (1 + 1.702 * x * (1 - s))
    elif ACT == "openai_gelu":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = x * s
        slope = s * (1 + x * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x))
    elif ACT == "gelu":
        s = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        y, slope = x * s, s + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        tl.static_assert(ACT == "squared_relu")
        r = tl.where(x > 0, x, x * 0.0)  # what is no number stays none
        y, slope = r * r, 2 * r
    return y, slope


@triton.jit
def _load(GateUp, start, place, inside, width, clamp, CLAMPS: tl.constexpr):
    """Load gate and up of a row, clamped, and whether their gradients pass the clamp."""
    gate = tl.load(GateUp + start + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GateUp + start + width + place, mask=inside, other=0.0).to(tl.float32)
    gate_passes, up_passes = inside, inside
    if CLAMPS:
        gate_passes, up_passes = gate <= clamp, (up >= -clamp) & (up <= clamp)
        gate = tl.where(gate > clamp, clamp, gate)
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    return gate, up, gate_passes, up_passes


@triton.jit
def _forward(
    GateUp,
    Weights,
    Out,
    width,
    clamp,
    offset,
    ACT: tl.constexpr,
    CLAMPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    weight = 1.0
    if Weights is not None:
        weight = tl.load(Weights + m).to(tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < width
        gate, up, _, _ = _load(GateUp, m * 2 * width, place, inside, width, clamp, CLAMPS)
        y, _ = act_and_slope(gate, ACT)
        out = y * (up + offset) * weight
        tl.store(Out + m * width + place, out.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    GateUp,
    Weights,
    Grad,
    Out,
    OfWeights,
    width,
    clamp,
    offset,
    ACT: tl.constexpr,
    CLAMPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    weight = 1.0
    total = tl.zeros((BLOCK,), tl.float32)
    if Weights is not None:
        weight = tl.load(Weights + m).to(tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < width
        gate, up, gate_passes, up_passes = _load(
            GateUp, m * 2 * width, place, inside, width, clamp, CLAMPS
        )
        grad = tl.load(Grad + m * width + place, mask=inside, other=0.0).to(tl.float32)
        y, slope = act_and_slope(gate, ACT)
        up += offset
        total += grad * y * up
        grad *= weight
        of_gate = tl.where(gate_passes, grad * up * slope, 0.0)
        of_up = tl.where(up_passes, grad * y, 0.0)
        at = Out + m * 2 * width + place
        tl.store(at, of_gate.to(Out.dtype.element_ty), mask=inside)
        tl.store(at + width, of_up.to(Out.dtype.element_ty), mask=inside)
    if Weights is not None:
        tl.store(OfWeights + m, tl.sum(total, 0).to(OfWeights.dtype.element_ty))
