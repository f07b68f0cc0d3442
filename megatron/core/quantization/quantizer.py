"""Fake quantization: linear layers that multiply rounded inputs by rounded weights.

``t`` tokens, ``i``/``o`` input and output width of this rank's weight.  The layer's parameter keeps
unrounded values in the dtype of training; each pass rounds them to the format of the recipe, by the
scales in the buffers ``weight_scale`` and ``input_scale`` of the layer's ``quantizer``.  GEMMs
compute in the dtype of the layer.  Backward passes gradients straight through the rounding: the
input's uses the rounded weight, the weight's the rounded input, and clamped values get none.
Nothing here communicates, apart from the collectives of `linear`.

A model that only serves can replace its parameters by their codes: `store_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.autograd import Context, Function
from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.validation import INSIDE_QUANTIZER
from megatron.core.params.param_info import ParamInfo, info_of, set_info
from megatron.core.quantization.formats import (
    FP8_TENSOR,
    RECIPES,
    NumberFormat,
    Recipe,
    codes_of,
    is_in_range,
    pack_fp4,
    pack_int4,
    rounded_tokens,
    scale_shape,
    scales_of,
    unpack_fp4,
    unpack_int4,
    values_of,
)
from megatron.core.quantization.quant_config import LayerRecipes
from megatron.core.tensor_parallel.layers import Linear
from megatron.core.tensor_parallel.linear import (
    Gemms,
    LinearCall,
    Multiply,
    Params,
    linear,
    linear_of,
)
from megatron.core.tensor_parallel.weight_gradient import (
    WeightGrad,
    add_to_main_grad,
    adds_to_main_grad,
)
from megatron.core.transformer.attention import SelfAttention


@dataclass(frozen=True)
class StoredWeight:
    """Codes of a weight [o, i], 4-bit ones packed, and their scales."""

    codes: Tensor
    scale: Tensor
    scale_2: Tensor | None
    format: NumberFormat

    @classmethod
    def of(cls, codes: Tensor, quantizer: FakeQuantizer) -> StoredWeight:
        """Pack the codes [o, i] that ``quantizer`` has made."""
        to = quantizer.recipe.weight
        if to.bits == 4:
            codes = pack_int4(codes) if to.kind == "int" else pack_fp4(codes)
        return cls(codes, quantizer.weight_scale, quantizer.weight_scale_2, to)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values [o, i]."""
        codes = self.codes
        if self.format.bits == 4:
            codes = unpack_int4(codes) if self.format.kind == "int" else unpack_fp4(codes)
        return values_of(codes, self.scale, self.format, self.scale_2, dtype=dtype)


class FakeQuantizer(nn.Module, Gemms):
    """Rounds the input and the weight of one linear layer; holds their scales.

    ``weight_scale``: see `formats.scale_shape`.  ``weight_scale_2`` [1, 1]: only of nvfp4.
    ``input_scale`` [1, 1]: only if the recipe rounds inputs by a scale that calibration finds; for
    nvfp4 it is their second scale.  ``observe``: if set, called with each input in place of
    rounding; calibration sets it.
    """

    weight_scale: Tensor
    weight_scale_2: Tensor | None
    input_scale: Tensor | None

    def __init__(self, recipe: Recipe, weight: Tensor) -> None:
        super().__init__()
        self.recipe = recipe
        self.observe: Callable[[Tensor], None] | None = None
        self.stored: StoredWeight | None = None
        self.multiply: Multiply | None = None  # in place of `F.linear`, in a model that serves
        info = info_of(weight)
        to = recipe.weight
        is_sharded = info.shard_dim is not None and to.block[info.shard_dim] > 0
        of_scale = ParamInfo(
            global_shape=scale_shape(info.global_shape, to),
            shard_dim=info.shard_dim if is_sharded else None,
            shard_index=info.shard_index if is_sharded else 0,
            shard_count=info.shard_count if is_sharded else 1,
            blocks=info.blocks if is_sharded else (1,),
            is_expert=info.is_expert,
        )
        single = ParamInfo(global_shape=(1, 1), is_expert=info.is_expert)
        source = recipe.input
        has_input_scale = source is not None and (not source.is_dynamic or source.has_two_levels)
        self._add("weight_scale", weight, scale_shape(tuple(weight.shape), to), of_scale)
        self._add("weight_scale_2", weight, (1, 1) if to.has_two_levels else None, single)
        self._add("input_scale", weight, (1, 1) if has_input_scale else None, single)

    def _add(
        self, own: str, weight: Tensor, shape: tuple[int, int] | None, info: ParamInfo
    ) -> None:
        scale = None if shape is None else torch.zeros(shape, device=weight.device)
        self.register_buffer(own, scale)
        if scale is not None:
            name = info_of(weight).name.removesuffix(".weight") + INSIDE_QUANTIZER + own
            set_info(scale, replace(info, name=name))

    def forward(self, x: Tensor, call: LinearCall) -> Tensor:
        """Compute x W^T + b of rounded values.  Collective over the groups of ``call``."""
        call = call._replace(overlap=None)
        if self.observe is not None:
            self.observe(x)
            return linear(x, call)
        return linear_of(self.rounded_input(x), call, self)

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return ``x`` [.., i] rounded to the recipe's format of inputs."""
        to = self.recipe.input
        return x if to is None else _RoundInput.call(x, self.input_scale, to)

    def values(self, weight: Tensor) -> Tensor:
        """See `Gemms`."""
        if self.stored is not None:
            return self.stored.values(weight.dtype)
        to = self.recipe.weight
        codes = self.codes(weight)
        return values_of(codes, self.weight_scale, to, self.weight_scale_2, dtype=weight.dtype)

    def codes(self, weight: Tensor) -> Tensor:
        """Return the codes [o, i] of ``weight``."""
        return codes_of(weight, self.weight_scale, self.recipe.weight, self.weight_scale_2)

    def matrix(self, weight: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
        """See `Gemms`."""
        values = self.values(weight)
        return values.t() if transposed else values

    def product(
        self, rows: Tensor, matrix: Tensor, dtype: torch.dtype, bias: Tensor | None, forward: bool
    ) -> Tensor:
        """See `Gemms`."""
        if self.multiply is not None:
            return self.multiply(rows, matrix, bias)
        return super().product(rows, matrix, dtype, bias, forward)

    def weight_grad(
        self, params: Params, grad: Tensor, rows: Tensor, saved: list[Tensor], call: LinearCall
    ) -> WeightGrad:
        """See `Gemms`."""
        (x,) = saved
        group = call.gather_group
        return _MaskedWeightGrad(self, *params, rows, x, group=group, is_own=call.is_own)

    def set_weight_scales(self, weight: Tensor) -> None:
        """Compute the scales of ``weight``, if no other rank has values of its blocks."""
        scale, scale_2 = scales_of(weight, self.recipe.weight)
        self.weight_scale.copy_(scale)
        if self.weight_scale_2 is not None and scale_2 is not None:
            self.weight_scale_2.copy_(scale_2)


class KVQuantizer(nn.Module):
    """Rounds the keys and values of an attention layer to fp8, before a cache holds them."""

    def __init__(self, attention: str, like: Tensor) -> None:
        """``attention``: global name of the layer; ``like``: a tensor of its device."""
        super().__init__()
        self.key = FixedRounding(f"{attention}{INSIDE_QUANTIZER}k_scale", like)
        self.value = FixedRounding(f"{attention}{INSIDE_QUANTIZER}v_scale", like)

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Round keys and values [.., d]."""
        return self.key(key), self.value(value)


class FixedRounding(nn.Module):
    """Rounds a tensor to fp8 by one scale, ``input_scale`` [1, 1], which calibration finds."""

    input_scale: Tensor

    def __init__(self, name: str, like: Tensor) -> None:
        super().__init__()
        self.recipe = Recipe("kv cache", FP8_TENSOR, FP8_TENSOR)
        self.observe: Callable[[Tensor], None] | None = None
        self.register_buffer("input_scale", torch.zeros(1, 1, device=like.device))
        set_info(self.input_scale, ParamInfo(name=name, global_shape=(1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Round ``x`` [.., d]."""
        if self.observe is not None:
            self.observe(x)
            return x
        return _RoundInput.call(x, self.input_scale, FP8_TENSOR)


class _RoundInput(Function[Tensor]):
    """Round x [.., i]; backward passes gradients of values that are not clamped."""

    @staticmethod
    def forward(ctx: Context[None], x: Tensor, static: Tensor | None, to: NumberFormat) -> Tensor:
        rows = x.flatten(0, -2)
        if not to.is_symmetric:
            return rounded_tokens(rows, to).view_as(x)
        scale = static
        scale_2 = static if to.has_two_levels else None
        if to.is_dynamic:
            scale, scale_2 = scales_of(rows, to, scale_2)
        assert scale is not None, "a static format has a scale"
        codes = codes_of(rows, scale, to, scale_2)
        if static is not None:
            ctx.save_for_backward(is_in_range(rows, scale, to, scale_2).view_as(x))
        return values_of(codes, scale, to, scale_2, dtype=x.dtype).view_as(x)

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return grad * kept[0] if kept else grad, None, None


class _MaskedWeightGrad(WeightGrad):
    """`WeightGrad` of the weight's values that are not clamped."""

    def __init__(self, quantizer: FakeQuantizer, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._quantizer = quantizer

    def _product(self, weight: Tensor) -> Tensor | None:
        quantizer = self._quantizer
        kept = is_in_range(
            weight, quantizer.weight_scale, quantizer.recipe.weight, quantizer.weight_scale_2
        )
        grad = self.grad.t().matmul(self.x) * kept
        if self.is_own and adds_to_main_grad(weight):
            return add_to_main_grad(weight, grad)
        return grad


def attach_quantizers(
    model: nn.Module, recipe_of: LayerRecipes, *, rounds_cache: bool = False
) -> None:
    """Add quantizers to the linear layers of ``model`` for which ``recipe_of`` returns a recipe.

    Parameters need their names.  ``rounds_cache``: quantize the keys and values of
    layers whose query, key and value projection is quantized.  No communication.
    Raises ConfigError for a layer that the format cannot represent.
    """
    for path, layer in [*model.named_modules()]:
        if rounds_cache and isinstance(layer, SelfAttention):
            qkv = layer.linear_qkv.weight
            name = info_of(qkv).name.removesuffix(".weight")
            if recipe_of(name) is not None:
                layer.quantizer = KVQuantizer(name.removesuffix(".linear_qkv"), qkv)
        weight = layer.weight if isinstance(layer, Linear) else None
        if weight is None:
            if hasattr(layer, "num_gemms"):
                _refuse(path, "experts in one grouped layer", "use --transformer-impl local")
            continue
        info = info_of(weight)
        name = info.name.removesuffix(".weight") or path
        recipe = None if info.is_embedding_or_output or info.is_new else recipe_of(name)
        if recipe is None:
            continue
        if getattr(layer, "engine", None) is not None:
            _refuse(name, "a layer of Transformer Engine", "use --transformer-impl local")
        height = weight.shape[0] // (len(info.blocks) if recipe.weight.block[0] > 1 else 1)
        problem = recipe.weight.problem((height, weight.shape[1]))
        if problem is None and recipe.input is not None:
            problem = replace(recipe.input, block=(0, recipe.input.block[1])).problem(weight.shape)
        if problem is not None:
            _refuse(name, f"{recipe.name} cannot represent this rank's weight: {problem}", _OTHERS)
        layer.quantizer = FakeQuantizer(recipe, weight)


_OTHERS = (
    f"use another --export-quant-cfg ({', '.join(RECIPES)}), another --tensor-model-parallel-size "
    "or widths, or exclude the layer by --kitchen-config-file"
)


def _refuse(name: str, problem: str, fix: str) -> None:
    raise ConfigError(f"--export-quant-cfg: {name}: {problem}; {fix}")


def quantized_layers(chunks: Sequence[nn.Module]) -> Iterator[tuple[Linear, FakeQuantizer]]:
    """Yield the layers of ``chunks`` that have a quantizer, with it."""
    for chunk in chunks:
        for layer in chunk.modules():
            if isinstance(layer, Linear) and isinstance(layer.quantizer, FakeQuantizer):
                yield layer, layer.quantizer


@torch.no_grad()
def store_weights(chunks: Sequence[nn.Module]) -> None:
    """Replace the values of quantized weights by their codes; the parameters keep no memory.

    The model computes the same values as before, and can only serve.
    """
    for layer, quantizer in quantized_layers(chunks):
        weight = layer.weight
        assert weight is not None, "a quantized layer has a weight"
        quantizer.stored = StoredWeight.of(quantizer.codes(weight), quantizer)
        weight.data = weight.new_zeros(()).expand(weight.shape)


@contextmanager
def restored_parameters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Give the parameters of `store_weights` memory in the context, to load a checkpoint again."""
    with torch.no_grad():
        for layer, quantizer in quantized_layers(chunks):
            if layer.weight is not None and quantizer.stored is not None:
                layer.weight.data = quantizer.stored.values(layer.weight.dtype)
                quantizer.stored = None
    try:
        yield
    finally:
        store_weights(chunks)
