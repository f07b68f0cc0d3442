"""Faster matmuls for generation: kernels for few rows, weights in 16 or 8 bits, batch invariance.

On a CPU a step is limited by the bandwidth with which weights are read.  `use_fast_linears` binds
`small_linear` to the layers of a model that only generates; the parameters stay as they are, so
that a checkpoint or an update of the weights can be loaded into them.

`compute_as_engine` gives a model in training the values of a batch-invariant engine, bit for bit:
each layer computes its value by the engine's kernel and its gradient by the kernels of training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.autograd import Context, Function
from megatron.core.config.errors import ConfigError
from megatron.core.fusions.paged_attention import PagedBatch, paged_attention
from megatron.core.fusions.rms_norm import norm_rows_alike
from megatron.core.fusions.small_linear import Weight, quantize_weight, small_linear
from megatron.core.quantization.quantizer import FakeQuantizer
from megatron.core.tensor_parallel.layers import Linear, RowParallelLinear
from megatron.core.tensor_parallel.linear import LinearCall, linear
from megatron.core.tensor_parallel.mappings import all_gather_first_dim
from megatron.core.transformer.attention_blocks import QKV
from megatron.core.transformer.batch_invariant import make_batch_invariant, sigmoid
from megatron.core.transformer.context_parallel import AttentionContext
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.norms import Norm

WeightFormat = Literal["fp32", "bf16", "int8"]
_MOST_ROWS = 16  # above, torch's matmul in bfloat16 is faster
_PARTS = 8  # of the inputs of a layer whose outputs are summed over ranks
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
            in_parts = batch_invariant and isinstance(module, RowParallelLinear)
            module.quantizer = FastLinear(weights, batch_invariant, in_parts=in_parts)
        elif isinstance(module, Linear) and isinstance(module.quantizer, FakeQuantizer):
            module.quantizer.multiply = FastLinear("fp32", batch_invariant).multiply
        elif isinstance(module, Norm):
            module.norm_rows = norm_rows_alike


def compute_as_engine(model: nn.Module) -> None:
    """Let ``model``, which trains, compute the values of a batch-invariant engine, bit for bit.

    Values come from the engine's kernels, gradients from those of training: a layer computes both.
    Raises MissingDependency or ConfigError if that is not possible.
    """
    make_batch_invariant(model, "--batch-invariant-mode")
    for module in model.modules():
        if isinstance(module, Linear):
            if module.quantizer is not None:
                raise ConfigError("--batch-invariant-mode needs layers that are not quantized")
            in_parts = isinstance(module, RowParallelLinear)
            fast = FastLinear("fp32", True, in_parts=in_parts)
            module.quantizer = partial(_value_and_gradient, fast, linear)
        elif isinstance(module, Norm):
            module.norm_rows = norm_rows_alike
        elif isinstance(module, DotProductAttention):
            fast_attention = partial(attend_in_pages, module)
            # In place of the method, on this instance.
            vars(module)["attend"] = partial(_value_and_gradient, fast_attention, module.attend)
        elif isinstance(module, (TopKRouter, SharedExpertMLP)):
            module.multiply = partial(_value_and_gradient, small_linear, F.linear)
            gate = partial(_value_and_gradient, sigmoid, torch.sigmoid)  # e^-x may be infinite
            if isinstance(module, TopKRouter):
                module.rule = replace(module.rule, sigmoid=gate)
            else:
                module.sigmoid = gate


def _value_and_gradient(
    value_of: Callable[..., Tensor], plain: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """Return the value of ``value_of`` with the gradient of ``plain``, of the same arguments."""
    with torch.no_grad():
        value = value_of(*arguments)
    return _Valued.call(plain(*arguments), value) if torch.is_grad_enabled() else value


class _Valued(Function[Tensor]):
    """The second input, with the gradient of the first."""

    @staticmethod
    def forward(ctx: Context[None], y: Tensor, value: Tensor) -> Tensor:
        return value.view_as(y)

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class FastLinear:
    """The matmul of one layer, in place of a quantizer; see `use_fast_linears`.

    ``in_parts``: sum over `_PARTS` equal parts of the inputs in a binary tree, in float32.  A
    tensor-parallel rank sums its branch, so that the bits do not depend on the number of ranks.
    """

    def __init__(
        self, weights: WeightFormat, batch_invariant: bool, *, in_parts: bool = False
    ) -> None:
        self._format = weights
        self._batch_invariant = batch_invariant
        self._in_parts = in_parts
        self._made: tuple[Tensor, int, Weight] | None = None  # parameter, its version, copy

    def __call__(self, x: Tensor, call: LinearCall) -> Tensor:
        """Compute x W^T + b.  Collective over the groups of ``call``."""
        assert not torch.is_grad_enabled(), "the layers of this model are bound to generation"
        weight = self._weight(call.weight)
        group = call.output_group
        num_ranks = 1 if group is None else group.size()
        width = call.weight.shape[1] * num_ranks
        is_power = _PARTS % num_ranks == 0
        if not (self._in_parts and is_power and width % _PARTS == 0 and isinstance(weight, Tensor)):
            return call.summed(self.multiply(call.gathered(x), weight, call.bias))
        parts = _PARTS // num_ranks
        pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
        sums = [small_linear(a.float(), b.contiguous()) for a, b in pairs]
        if group is not None and num_ranks > 1:
            y = _sum_pairwise(sums)
            sums = [*all_gather_first_dim(y[None], group)]
        y = _sum_pairwise(sums).to(x.dtype)
        if call.scatters_output and group is not None:
            y = y.chunk(num_ranks)[group.rank()]
        return y if call.bias is None else y + call.bias

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


def _sum_pairwise(terms: list[Tensor]) -> Tensor:
    """Add a power of two of tensors, neighbours first."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def attend_in_pages(core: DotProductAttention, qkv: QKV, context: AttentionContext) -> Tensor:
    """Attend as `DotProductAttention.attend` does, by the engine's kernel; a page has one token."""
    if context.hidden is not None or context.bias is not None or not context.is_causal:
        raise ConfigError(
            "--batch-invariant-mode: the engine's attention has no masks but those of causality, "
            "windows, packed sequences and documents"
        )
    num_tokens, num_rows = qkv[0].shape[:2]
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in qkv)  # [b s, n or g, d]
    if context.documents is not None:
        bounds = context.documents.cumulative
    elif context.packed is not None:
        bounds = context.packed.kernel_bounds(num_tokens, num_rows)
    else:
        bounds = num_tokens * torch.arange(num_rows + 1, dtype=torch.int32, device=query.device)
    lengths = bounds.diff()
    pages = bounds[:-1, None] + torch.arange(int(lengths.max()), device=query.device)
    batch = PagedBatch(bounds, lengths, pages.to(torch.int32))
    rule = core.paged_rule(query)
    y = paged_attention(query, key.unsqueeze(1), value.unsqueeze(1), batch, rule)
    return y.view(num_rows, num_tokens, -1).transpose(0, 1)
