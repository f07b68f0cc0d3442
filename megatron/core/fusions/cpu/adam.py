"""AdamW in one pass for parameters and states that are not all float32.

The storage formats are those of `optimizer.reduced_precision_state`.  If all are float32, torch's
own kernel already runs at memory bandwidth and is used.  The result of an element does not depend
on its address, so sharded updates are bitwise identical to unsharded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron.core.device import cpu_kernels
from megatron.core.fusions.adam_step import Step, Updated

MOMENTS = (torch.float32, torch.bfloat16)
WEIGHTS = (torch.bfloat16,)


def update(updated: Sequence[Updated], step: Step) -> None:
    """Update parameters, one after the other."""
    for each in updated:
        _update(each, step)


def _update(updated: Updated, step: Step) -> None:
    param, lower, grad, (means, *_), (squares, *_), weight = updated
    beta1, beta2 = step.betas
    of_mean, of_square = float(step.corrections[0]), float(step.corrections[1])
    rounded = [name for name, kept in (("mean", means), ("square", squares)) if kept.itemsize == 2]
    cpu_kernels.run(
        " ".join(["adam", *rounded]),
        [param, lower, grad, means, squares, weight],
        format=grad.dtype,
        sizes=(int(step.number),),
        numbers=(
            float(step.divisor),
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
