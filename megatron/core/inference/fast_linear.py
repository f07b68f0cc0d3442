"""Faster matmuls for generation: kernels for few rows, weights in 16 or 8 bits, batch invariance.

On a CPU a step is limited by the bandwidth with which weights are read.  `use_fast_linears` binds
`small_linear` to the layers of a model that only generates; the parameters stay as they are, so
that a checkpoint or an update of the weights can be loaded into them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fusions.rms_norm import norm_rows_alike
from megatron.core.fusions.small_linear import Weight, quantize_weight, small_linear
from megatron.core.quantization.quantizer import FakeQuantizer
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.tensor_parallel.linear import LinearCall
from megatron.core.transformer.batch_invariant import make_batch_invariant
from megatron.core.transformer.norms import Norm

WeightFormat = Literal["fp32", "bf16", "int8"]
_MOST_ROWS = 16  # above, torch's matmul in bfloat16 is faster
_MANY_ROWS = 56  # from here on oneDNN's in float32 is, which torch does not call by itself


def use_fast_linears(
    model: nn.Module, weights: WeightFormat = "fp32", *, batch_invariant: bool = False
) -> None:
    """Bind fast matmuls to all linear layers of ``model``, which gets no gradients afterwards.

    ``weights``: "fp32" reads the parameters as they are; "bf16" and "int8" a copy of them, made in
    the first step and again after a parameter has changed in place (not through ``.data``).
    Layers with low-precision GEMMs of their own keep them, and those of --export-quant-cfg their
    rounded weights.  Routers stay in their precision.
    Raises MissingDependency or ConfigError if ``batch_invariant`` is not possible.
    """
    if batch_invariant:
        make_batch_invariant(model)
    for module in model.modules():
        if isinstance(module, Linear) and (
            module.quantizer is None or isinstance(module.quantizer, FastLinear)
        ):
            module.quantizer = FastLinear(weights, batch_invariant)
        elif isinstance(module, Linear) and isinstance(module.quantizer, FakeQuantizer):
            module.quantizer.multiply = FastLinear("fp32", batch_invariant).multiply
        elif isinstance(module, Norm):
            module.norm_rows = norm_rows_alike


class FastLinear:
    """The matmul of one layer, in place of a quantizer; see `use_fast_linears`."""

    def __init__(self, weights: WeightFormat, batch_invariant: bool) -> None:
        self._format = weights
        self._batch_invariant = batch_invariant
        self._made: tuple[Tensor, int, Weight] | None = None  # parameter, its version, copy

    def __call__(self, x: Tensor, call: LinearCall) -> Tensor:
        """Compute x W^T + b.  Collective over the groups of ``call``."""
        assert not torch.is_grad_enabled(), "the layers of this model are bound to generation"
        return call.summed(self.multiply(call.gathered(x), self._weight(call.weight), call.bias))

    def multiply(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """Compute x W^T + b."""
        if isinstance(weight, Tensor) and weight.dtype == x.dtype and not self._batch_invariant:
            num_rows = x.numel() // x.shape[-1]
            if weight.dtype == torch.bfloat16 and num_rows > _MOST_ROWS:
                return F.linear(x, weight, bias)
            has_onednn = x.is_cpu and torch.backends.mkldnn.is_available()
            if weight.dtype == torch.float32 and num_rows >= _MANY_ROWS and has_onednn:
                y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
                return y
        return small_linear(x, weight, bias)

    def _weight(self, weight: Tensor) -> Weight:
        if self._format == "fp32" or (self._format == "bf16" and weight.dtype == torch.bfloat16):
            return weight
        made = self._made
        if made is None or made[0] is not weight or made[1] != weight._version:
            copy = quantize_weight(weight) if self._format == "int8" else weight.bfloat16()
            made = self._made = weight, weight._version, copy
        return made[2]
