"""What an AdamW step in one pass is told, by kernels of a CPU and of a GPU alike."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Moment = tuple[Tensor, Tensor | None, bool]  # values, exponents of blocks, whether they are roots


class Step(NamedTuple):
    """What all parameters of a group share; ``corrections`` [2] are 1 - beta^number."""

    number: Tensor
    corrections: Tensor
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    divisor: float
