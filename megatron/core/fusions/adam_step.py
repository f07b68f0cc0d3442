"""Arguments of a fused AdamW step, for the CPU and the GPU kernel."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Moment = tuple[Tensor, Tensor | None, bool]  # values, exponents of blocks, whether they are roots


class Updated(NamedTuple):
    """Tensors of one parameter, all contiguous: float32, or bf16 with the ``lower`` 16 bits.

    A float32 parameter is also rounded into ``weight``, of one of the kernel's WEIGHTS.
    """

    param: Tensor
    lower: Tensor | None
    grad: Tensor
    mean: Moment
    square: Moment
    weight: Tensor | None = None


class Step(NamedTuple):
    """Values that all parameters of a group share; ``corrections`` [2] are 1 - beta^step.

    ``divisor`` of the gradients is float32.  The GPU kernel changes nothing if ``accepted`` is 0.
    """

    number: Tensor
    corrections: Tensor
    divisor: Tensor
    accepted: Tensor | None
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
