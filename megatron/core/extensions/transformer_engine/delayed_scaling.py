"""Scales of delayed scaling for Transformer Engine's linear layers.

The package keeps an amax history in each module, updates it with a collective after each forward
and backward pass of a micro-batch, also after recomputation, and saves it pickled.  Here the
history is a buffer of our layer, as in `LinearQuantizer`: `update_amax_histories` appends to it
once per step, and it is saved and resumes in every layout.  The module only quantizes with the
scales that it is given, and records amax values.

The scale of a weight follows from its current amax.  Without a history, inputs have the scale 1 of
the package, and gradients one for values up to 1: unscaled gradients of a model in bf16 are far
smaller, and become 0 with the scale 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.low_precision import largest, power_of_two
from megatron.core.tensor_parallel.quantized_linear import (
    GRADIENT,
    INPUT,
    AmaxHistory,
    Recipe,
    agreed_amax,
)

# Entry of a module's fp8_meta that tells the package that the module's amax values are already in
# its list of values to reduce.  They are not, so the package never updates them.
_IS_LISTED = "buffer_index_and_autocast_key"
_FORWARD = "scaling_fwd"
_BACKWARD = "scaling_bwd"
# Columns of the forward state of a module with one GEMM.
_INPUT = 0
_WEIGHT = 1
_GRADIENT = 0  # column of its backward state


class EngineAmax(AmaxHistory):
    """Amax history of a linear layer whose GEMMs the package computes."""

    def __init__(
        self,
        run: Callable[[Tensor], Tensor],
        recipe: Recipe,
        weight: Tensor,
        *,
        amax_group: ProcessGroup,
        is_expert: bool,
    ) -> None:
        """``run`` is that of the engine, which calls `prepare`."""
        super().__init__(recipe, weight, is_expert=is_expert)
        self._run = run
        self._amax_group = amax_group
        self._meta: dict[str, Any] | None = None  # of the module that is called
        self._scaled_by = -1  # version of the history that gave the scales
        self._weight: tuple[int, int] | None = None  # address and version of the scaled weight
        self._has_evaluated = False  # since the module's amax values were 0

    def forward(self, x: Tensor, *of_layer: object) -> Tensor:
        """Run the engine as the quantizer of `linear`; see `Engine.__call__`."""
        return self._run(x)

    def prepare(self, module: nn.Module, weight: nn.Parameter) -> None:
        """Give ``module`` its scales, inside of the package's autocast.

        Collective over the amax group after a change of the weight.
        """
        meta: dict[str, Any] = module.fp8_meta  # type: ignore[assignment]
        if _FORWARD not in meta:
            meta[_IS_LISTED] = []
            module.init_fp8_metadata(num_gemms=1)  # type: ignore[operator]
            self._meta = meta
            self._scaled_by = -1
            self._weight = None
        forward = meta[_FORWARD]
        backward = meta[_BACKWARD]
        if self.training and self._has_evaluated:
            forward.amax_history[0].zero_()
        self._has_evaluated = not self.training
        top = self.recipe.forward.largest
        top_of_gradient = self.recipe.backward.largest
        if self._scaled_by != self.amax_history._version:
            self._scaled_by = self.amax_history._version
            margin = self.recipe.margin
            first = top_of_gradient if weight.dtype == torch.float16 else 1.0
            forward.scale[_INPUT] = _factor(self.known(INPUT), top, top, margin)
            known = self.known(GRADIENT)
            backward.scale[_GRADIENT] = _factor(known, top_of_gradient, first, margin)
        state = weight.data_ptr(), weight._version
        if state != self._weight or not hasattr(weight, "main_grad"):
            self._weight = state
            amax = agreed_amax(largest(weight.detach()), self._amax_group)
            forward.scale[_WEIGHT] = _factor(amax, top, top)

    def end_pass(self) -> None:
        """Take the amax values of the step from the module, and let it begin with 0."""
        if self._meta is None:
            return
        for which, key, column in ((INPUT, _FORWARD, _INPUT), (GRADIENT, _BACKWARD, _GRADIENT)):
            recorded = self._meta[key].amax_history[0]
            self.amax[which] = recorded[column]
            recorded.zero_()


def _factor(amax: Tensor, top: float, default: float, margin: int = 0) -> Tensor:
    """Return the factor by which ``amax``, or ``default`` if it is 0, becomes at most ``top``."""
    return 1 / power_of_two(torch.where(amax > 0, amax, default), top, margin)
