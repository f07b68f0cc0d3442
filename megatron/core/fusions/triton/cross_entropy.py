"""Softmax minus one-hot, written over logits [t, p]: two reads (one from cache) and one write.

Plain torch converts to float32 and back: six reads and three writes of all elements, half of them
at twice the width.  One program handles one row.  ``columns`` of the p are in the vocabulary.  A
target is a global id; ``first`` is the id of the first column of this rank.  A token with a
negative target has loss 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8  # 16 elements a thread: two loads of 16 bytes in bf16


def loss_and_gradient(logits: Tensor, target: Tensor, columns: int, scale: float) -> Tensor:
    """Return the loss of each token; ``logits`` become (softmax - onehot) * scale."""
    loss = logits.new_empty(len(logits), dtype=torch.float32)
    _loss_and_gradient[(len(logits),)](
        logits,
        target.contiguous(),
        loss,
        logits.stride(0),
        logits.shape[1],
        columns,
        scale,
        **_shape(logits),
    )
    return loss


def own_sums(logits: Tensor, target: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row and the target's logit (or 0), in one read."""
    log_sum, at_target = logits.new_empty(2, len(logits), dtype=torch.float32)
    _own_sums[(len(logits),)](
        logits,
        target.contiguous(),
        log_sum,
        at_target,
        logits.stride(0),
        first,
        columns,
        **_shape(logits),
    )
    return log_sum, at_target


def logits_to_grad_(
    logits: Tensor, target: Tensor, log_sum: Tensor, first: int, columns: int, scale: float | Tensor
) -> None:
    """Overwrite ``logits`` with (softmax - onehot) * scale; ``scale`` is a scalar or [t]."""
    _turn[(len(logits),)](
        logits,
        target.contiguous(),
        log_sum.contiguous(),
        logits.stride(0),
        logits.shape[1],
        first,
        columns,
        scale.contiguous() if isinstance(scale, Tensor) else scale,
        HAS_SCALES=isinstance(scale, Tensor),
        **_shape(logits),
    )


def _shape(logits: Tensor) -> dict[str, int]:
    block = max(128, min(_BLOCK, triton.next_power_of_2(logits.shape[1])))
    return {"BLOCK": block, "num_warps": _WARPS}


@triton.jit
def _sums(row, columns, BLOCK: tl.constexpr):
    """Return the maximum of a row and the sum of exponentials relative to it.

    Eight neighbours, all in one thread, share a running maximum.
    """
    place = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    highest = tl.full((BLOCK // 8,), -3.0e38, tl.float32)  # -inf less itself is no number
    total = tl.zeros((BLOCK // 8,), tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(row + start + place, mask=start + place < columns, other=-float("inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 1))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        highest = higher
    of_all = tl.max(highest, 0)
    return of_all, tl.sum(total * tl.exp(highest - of_all), 0)


@triton.jit
def _write_gradient(row, below, factor, index, width, columns, scale, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(row + place, mask=place < columns, other=-float("inf")).to(tl.float32)
        grad = (tl.exp(x - below) * factor - tl.where(place == index, 1.0, 0.0)) * scale
        grad = tl.where(place < columns, grad, 0.0)  # -inf less -inf, where no column is true
        tl.store(row + place, grad.to(row.dtype.element_ty), mask=place < width)


@triton.jit
def _write_zeros(row, width, BLOCK: tl.constexpr):
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(row + place, tl.zeros((BLOCK,), row.dtype.element_ty), mask=place < width)


@triton.jit
def _loss_and_gradient(Logits, Target, Loss, stride, width, columns, scale, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = Logits + t * stride
    index = tl.load(Target + t)
    if index < 0:
        tl.store(Loss + t, 0.0)
        _write_zeros(row, width, BLOCK)
    else:
        at_target = tl.load(row + index).to(tl.float32)
        highest, total = _sums(row, columns, BLOCK)
        # Of a small vocabulary, several warps have loaded the same logits, and one overwrites them.
        tl.debug_barrier()
        tl.store(Loss + t, tl.log(total) + (highest - at_target))
        _write_gradient(row, highest, 1 / total, index, width, columns, scale, BLOCK)


@triton.jit
def _own_sums(Logits, Target, LogSum, AtTarget, stride, first, columns, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = Logits + t * stride
    index = tl.load(Target + t) - first
    is_mine = (index >= 0) & (index < columns)
    highest, total = _sums(row, columns, BLOCK)
    tl.store(LogSum + t, highest + tl.log(total))
    tl.store(AtTarget + t, tl.load(row + index, mask=is_mine, other=0.0).to(tl.float32))


@triton.jit
def _turn(
    Logits,
    Target,
    LogSum,
    stride,
    width,
    first,
    columns,
    Scale,
    HAS_SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = Logits + t * stride
    target = tl.load(Target + t)
    if target < 0:
        _write_zeros(row, width, BLOCK)
    else:
        scale = tl.load(Scale + t).to(tl.float32) if HAS_SCALES else Scale
        index = target - first
        index = tl.where(index < columns, index, -1)
        _write_gradient(row, tl.load(LogSum + t), 1.0, index, width, columns, scale, BLOCK)
