"""AdamW in one pass for parameters and states that are not all float32.

The storage formats are those of `optimizer.reduced_precision_state`.  If all are float32, torch's
own kernel already runs at memory bandwidth and is used.  The result of an element does not depend
on its address, so sharded updates are bitwise identical to unsharded ones.
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
    """Update ``param``: float32, or bf16 with the ``lower`` 16 bits; all are contiguous.

    A float32 parameter is also rounded into ``weight`` (bf16) in the same pass.
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
