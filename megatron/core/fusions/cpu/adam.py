"""AdamW of a parameter whose numbers are not all float32, in one pass; formats of `kept_state`.

Where all are, torch's own kernel is at the memory's speed, and is left to it.  What an element
becomes does not depend on where it lies, so divided updates have the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.device import cpu_kernels
from megatron.core.fusions.adam_step import Moment, Step

MOMENTS = (torch.float32, torch.bfloat16)
WRITES_WEIGHTS = True


def update(
    param: Tensor,
    lower: Tensor | None,
    grad: Tensor,
    mean: Moment,
    square: Moment,
    step: Step,
    weight: Tensor | None = None,
) -> None:
    """``param`` is float32, or bf16 with the ``lower`` 16 bits; all are contiguous.

    What a float32 one rounds to is written into ``weight``, bf16, on the way.
    """
    (means, *_), (squares, *_), (beta1, beta2) = mean, square, step.betas
    of_mean, of_square = float(step.corrections[0]), float(step.corrections[1])
    rounded = [name for name, kept in (("mean", means), ("square", squares)) if kept.itemsize == 2]
    cpu_kernels.run(
        " ".join(["adam", *rounded]),
        [param, lower, grad, means, squares, weight],
        format=grad.dtype,
        sizes=(int(step.number),),
        numbers=(
            step.divisor,
            1 - step.lr * step.weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(of_square),
            step.eps,
            step.lr / of_mean,
        ),
        count=param.numel(),
    )
    torch.autograd.graph.increment_version([t for t in (param, weight) if t is not None])
