"""Faster matmuls for generation: kernels for few rows, weights in 16 or 8 bits, batch invariance.

On a CPU a step is limited by the bandwidth with which weights are read.  `use_fast_linears` binds
`small_linear` to the layers of a model that only generates; the parameters stay as they are, so
that a checkpoint or an update of the weights can be loaded into them.

Batch invariance: bits of a row do not depend on the other rows of the step.  Of torch's operations
on a CPU, matmuls depend on the number of rows, and sigmoid, SiLU, softplus and GELU (tanh) on the
place of a value unless rows have a multiple of 16 values; norms, softmax, top-k, exp, GELU (erf),
tanh, embeddings and rotary positions do not.  MLPs use compiled kernels, which do not either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.config.errors import ConfigError, MissingDependency
from megatron.core.device import cpu_kernels
from megatron.core.fusions.small_linear import Weight, quantize_weight, small_linear
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

WeightFormat = Literal["fp32", "bf16", "int8"]
_MOST_ROWS = 16  # above, torch's matmul in bfloat16 is faster


def use_fast_linears(
    model: nn.Module, weights: WeightFormat = "fp32", *, batch_invariant: bool = False
) -> None:
    """Bind fast matmuls to all linear layers of ``model``, which gets no gradients afterwards.

    ``weights``: "fp32" reads the parameters as they are; "bf16" and "int8" a copy of them, made in
    the first step and again after a parameter has changed in place (not through ``.data``).
    Layers with low-precision GEMMs of their own keep them.  Routers stay in their precision.
    Raises MissingDependency or ConfigError if ``batch_invariant`` is not possible.
    """
    if batch_invariant:
        _check_invariance(model)
    for module in model.modules():
        if isinstance(module, Linear):
            if module.quantizer is None or isinstance(module.quantizer, _FastLinear):
                module.quantizer = _FastLinear(weights, batch_invariant)
        elif not batch_invariant:
            continue
        elif isinstance(module, TopKRouter):
            module.multiply = small_linear
            module.choice = replace(module.choice, sigmoid=sigmoid)
        elif isinstance(module, SharedExpertMLP):
            module.multiply, module.sigmoid = small_linear, sigmoid
        elif isinstance(module, MLASelfAttention):
            module.multiply_heads = multiply_heads


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + e^-x); its bits do not depend on the place of a value, as torch's do."""
    return 1 / (1 + torch.exp(-x))


def multiply_heads(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head with its matrix, row by row: [s, b, n, i], [n, o, i] -> [s, b, n, o]."""
    heads = zip(x.unbind(2), weight.contiguous(), strict=True)
    return torch.stack([small_linear(row, matrix) for row, matrix in heads], 2)


class _FastLinear:
    """The matmul of one layer, in place of a quantizer."""

    def __init__(self, weights: WeightFormat, batch_invariant: bool) -> None:
        self._format, self._batch_invariant = weights, batch_invariant
        self._made: tuple[Tensor, int, Weight] | None = None  # parameter, its version, copy

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: ProcessGroup | None,
        sequence_parallel: bool,
    ) -> Tensor:
        """Compute x W^T + b.  Collective over ``group`` with ``sequence_parallel``."""
        assert not torch.is_grad_enabled(), "the layers of this model are bound to generation"
        if sequence_parallel:
            assert group is not None, "sequence parallelism has a group"
            x = all_gather_first_dim(x, group)
        taken = self._weight(weight)
        if isinstance(taken, Tensor) and taken.dtype == x.dtype == torch.bfloat16:
            num_rows = x.numel() // x.shape[-1]
            if num_rows > _MOST_ROWS and not self._batch_invariant:
                return F.linear(x, taken, bias)
        return small_linear(x, taken, bias)

    def _weight(self, weight: Tensor) -> Weight:
        if self._format == "fp32" or (self._format == "bf16" and weight.dtype == torch.bfloat16):
            return weight.detach()
        made = self._made
        if made is None or made[0] is not weight or made[1] != weight._version:
            copy = quantize_weight(weight) if self._format == "int8" else weight.bfloat16()
            made = self._made = weight, weight._version, copy
        return made[2]


def _check_invariance(model: nn.Module) -> None:
    for module in model.modules():
        biased = getattr(module, "position_embedding_type", None) in ("alibi", "relative")
        if biased or isinstance(module, MambaMixer):
            what = "attention with position biases" if biased else "the scan of a Mamba layer"
            raise ConfigError(
                f"--inference-batch-invariant: {what} runs torch's matmuls, whose bits depend on "
                "the number of rows; leave the flag out for this model"
            )
    dtypes = {p.dtype for p in model.parameters()}
    if any(device.is_cuda(p.device) for p in model.parameters()):
        raise ConfigError("batch-invariant generation runs on a CPU only: add --device cpu")
    for dtype in dtypes:
        reason = cpu_kernels.unsupported_reason(dtype)
        if reason is None and not cpu_kernels.has("small_linear", dtype):
            reason = "the compiled kernels are of an older version"
        if reason is not None:
            raise MissingDependency(f"batch-invariant generation needs compiled kernels: {reason}")
