"""Arguments of a fused AdamW step, for the CPU and the GPU kernel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Moment = tuple[Tensor, Tensor | None, bool]  # values, exponents of blocks, whether they are roots


class Step(NamedTuple):
    """Values that all parameters of a group share; ``corrections`` [2] are 1 - beta^step."""

    number: Tensor
    corrections: Tensor
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    divisor: float
