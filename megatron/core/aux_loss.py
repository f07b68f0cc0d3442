"""Losses that a layer adds to the model's own: their gradients, and their values for the log.

Each module that has such losses keeps an `AuxLosses` as ``aux_losses``; what drives the step sets
their weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megatron.core.autograd import Context, Function


class AuxLosses:
    """Of one layer on one rank.  ``values``: sums over the micro-batches of a step, by name."""

    def __init__(self, layer_index: int) -> None:
        self.layer_index = layer_index  # from 0 over the whole model
        # In the gradient of a step: 1 / micro-batches, times what scales the loss of the model.
        self.weight: float | Tensor = 1.0
        self.values: dict[str, Tensor] = {}
        # What a loss over the whole step has counted so far, and in how many micro-batches.
        self.counted: Tensor | None = None
        self.num_counted = 0

    def begin(self, weight: float | Tensor) -> None:
        """A step begins, of which a micro-batch counts ``weight``."""
        self.weight, self.counted, self.num_counted = weight, None, 0

    def attach(
        self, x: Tensor, name: str, loss: Tensor, coefficient: float, reported: Tensor | None = None
    ) -> Tensor:
        """``x``, through whose backward pass ``coefficient * loss`` gets its gradient.

        Logs ``reported``, by default the loss, once where the pass is recomputed.
        """
        if not torch.is_grad_enabled():
            return x
        value, seen = (loss if reported is None else reported).detach(), self.values.get(name)
        self.values[name] = value if seen is None else seen + value
        return _Attach.apply(x, loss * coefficient, self)

    def take(self) -> dict[str, Tensor]:
        """The values so far, which start again from nothing."""
        values, self.values = self.values, {}
        return values


class _Attach(Function[Tensor]):
    @staticmethod
    def forward(ctx: Context[AuxLosses], x: Tensor, loss: Tensor, losses: AuxLosses) -> Tensor:
        ctx.values = losses
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context[AuxLosses], grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss) * ctx.values.weight, None


def aux_losses_of(models: Iterable[nn.Module]) -> Iterator[AuxLosses]:
    """Those of the layers of ``models``, in order."""
    for model in models:
        for module in model.modules():
            losses = module.__dict__.get("aux_losses")
            if losses is not None:
                yield losses
