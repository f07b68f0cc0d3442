"""Auxiliary losses of layers: add their gradients, collect their values for the log.

A module with auxiliary losses stores an `AuxLosses` as its attribute ``aux_losses``; the function
that runs the step calls `AuxLosses.begin`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function


class AuxLosses:
    """Auxiliary losses of one layer on this rank.

    ``values``: name -> sum of the reported values over the micro-batches since the last `take`.
    """

    # Factor of the gradient: 1 / number of micro-batches, times the scale of the model's loss.
    weight: float | Tensor = 1.0
    # The losses of this process, for Megatron Core's log of them.
    instances: ClassVar[WeakSet[AuxLosses]] = WeakSet()

    def __init__(
        self, layer_index: int, num_layers: int = 0, group: ProcessGroup | None = None
    ) -> None:
        """Create it for a layer of ``num_layers``; ``group``: ranks whose values are summands."""
        self.layer_index = layer_index  # 0-based index in the complete model
        self.num_layers = num_layers
        self.group = group
        self.instances.add(self)
        self.values: dict[str, Tensor] = {}
        # For a loss over all micro-batches of a step: counts so far, and number of micro-batches.
        self.counted: Tensor | None = None
        self.num_counted = 0

    def begin(self, weight: float | Tensor) -> None:
        """Begin a step whose auxiliary losses have the factor ``weight`` in each micro-batch."""
        self.weight, self.counted, self.num_counted = weight, None, 0

    def attach(
        self,
        x: Tensor,
        name: str,
        loss: Tensor,
        coefficient: float | Tensor,
        reported: Tensor | None = None,
    ) -> Tensor:
        """Return ``x``; its backward pass also computes gradients of ``coefficient * loss``.

        Adds ``reported`` (default: the loss) to ``values``.  Does nothing with gradients disabled,
        so that a recomputed forward pass counts once.
        """
        if not torch.is_grad_enabled():
            return x
        value, seen = (loss if reported is None else reported).detach(), self.values.get(name)
        self.values[name] = value if seen is None else seen + value
        return MoEAuxLossAutoScaler.apply(x, loss * coefficient, self)

    def take(self) -> dict[str, Tensor]:
        """Return ``values`` and reset them."""
        values, self.values = self.values, {}
        return values


class MoEAuxLossAutoScaler(Function[Tensor]):
    """Returns ``output``; backward adds the gradient of ``aux_loss``, times a weight.

    The weight of ``losses``; without them the scale of `set_loss_scale`.
    """

    main_loss_backward_scale: Any = None

    @staticmethod
    def forward(
        ctx: Context[AuxLosses | type[AuxLosses]],
        output: Tensor,
        aux_loss: Tensor,
        losses: AuxLosses | type[AuxLosses] = AuxLosses,
    ) -> Tensor:
        """Attach ``aux_loss`` to ``output``."""
        ctx.values = losses
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    def backward(
        ctx: Context[AuxLosses | type[AuxLosses]], grad_output: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of both."""
        (loss,) = ctx.saved_tensors
        return grad_output, torch.ones_like(loss) * ctx.values.weight, None

    @staticmethod
    def set_loss_scale(scale: Tensor) -> None:
        """Set the scale of the main loss, also for layers that no schedule runs."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
        AuxLosses.weight = scale


def aux_losses_of(models: Iterable[nn.Module]) -> Iterator[AuxLosses]:
    """Yield the auxiliary losses of all modules of ``models``, in order."""
    for model in models:
        for module in model.modules():
            losses = module.__dict__.get("aux_losses")
            if losses is not None:
                yield losses
