"""Fake quantization of linear layers: values, gradients, buffers and stored codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.params.param_info import info_of
from megatron.core.params.param_init import Init
from megatron.core.quantization.formats import (
    RECIPES,
    NumberFormat,
    Recipe,
    codes_of,
    rounded_tokens,
    scales_of,
    values_of,
)
from megatron.core.quantization.quantizer import (
    FakeQuantizer,
    attach_quantizers,
    quantized_layers,
    restored_parameters,
    store_weights,
)
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests.support.one_process import tiny_config
from tests.unit.models.test_gpt_model import build, tokens
from tests.unit.tensor_parallel.test_quantized_linear import draw

WIDTHS: dict[str, Any] = {"hidden_size": 128, "ffn_hidden_size": 256}


def make(recipe: Recipe, dtype: torch.dtype = torch.float64) -> ReplicatedLinear:
    config = tiny_config(params_dtype=dtype)
    layer = ReplicatedLinear(256, 128, config=config, init_method=Init("normal", 1), bias=True)
    with torch.no_grad():
        layer.weight.copy_(draw(128, 256))
        assert layer.bias is not None
        layer.bias.copy_(draw(128, seed=1))
    quantizer = FakeQuantizer(recipe, layer.weight)
    quantizer.set_weight_scales(layer.weight)
    with torch.no_grad():
        quantizer.weight_scale[:] *= 0.7  # clamps some weights
    if quantizer.input_scale is not None:
        assert recipe.input is not None
        scale = 2e-4 if recipe.name == "nvfp4" else 2 / recipe.input.largest  # clamps some inputs
        quantizer.input_scale.fill_(scale)
    layer.quantizer = quantizer
    return layer


def plain(x: Tensor, scale: Tensor, to: NumberFormat, scale_2: Tensor | None = None) -> Tensor:
    """Round by torch alone, with autograd's gradient of a clamp: 1 where nothing is clamped."""
    values = values_of(codes_of(x, scale, to, scale_2), scale, to, scale_2, dtype=x.dtype)
    high, wide = (size // of for size, of in zip(x.shape, scale.shape, strict=True))
    s = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    s = s if scale_2 is None else s * scale_2
    top = {("int", 8): 127.5, ("int", 4): 7.5, ("float", 8): 464.0, ("float", 4): 7.0}
    limit = top[to.kind, to.bits] if not to.is_dynamic or to.has_two_levels else torch.inf
    low = limit + (1 if to.kind == "int" else 0)
    clamped = x.clamp(-low * s, limit * s)
    return clamped + (values - clamped).detach()


@pytest.mark.feature("Quantization: QAT with exact gradients of rounded weights and inputs")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_values_and_gradients_are_those_of_the_plain_formula(recipe: Recipe) -> None:
    layer = make(recipe)
    quantizer = layer.quantizer
    assert isinstance(quantizer, FakeQuantizer)
    x = draw(24, 2, 256, seed=2).requires_grad_()
    g = draw(24, 2, 128, seed=3)
    y, _ = layer(x)
    y.backward(g)
    found = y.detach(), x.grad, layer.weight.grad, layer.bias.grad  # type: ignore[union-attr]
    x.grad = layer.weight.grad = None
    layer.bias.grad = None  # type: ignore[union-attr]
    w = plain(layer.weight, quantizer.weight_scale, recipe.weight, quantizer.weight_scale_2)
    rounded: Tensor = x
    if recipe.input is not None and not recipe.input.is_symmetric:
        tokens_of = rounded_tokens(x.flatten(0, -2), recipe.input)
        rounded = x + (tokens_of.view_as(x) - x).detach()
    elif recipe.input is not None:
        rows = x.flatten(0, -2)
        scale, scale_2 = quantizer.input_scale, quantizer.input_scale
        if recipe.input.is_dynamic:
            scale, scale_2 = scales_of(rows, recipe.input, scale_2)
        assert scale is not None
        scale_2 = scale_2 if recipe.input.has_two_levels else None
        rounded = plain(rows, scale, recipe.input, scale_2).view_as(x)
    expected_y = torch.nn.functional.linear(rounded, w, layer.bias)
    expected_y.backward(g)
    expected = expected_y.detach(), x.grad, layer.weight.grad, layer.bias.grad  # type: ignore[union-attr]
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-10)
    assert layer.weight.grad is not None
    assert (layer.weight.grad == 0).any()


def test_deferred_weight_gradients_are_the_same() -> None:
    layer = make(RECIPES["fp8"])
    x = draw(24, 2, 256, seed=2)
    layer(x)[0].square().sum().backward()
    expected = layer.weight.grad
    layer.weight.grad = None
    queue = WeightGradQueue()
    y = layer(x)[0].square().sum()
    with queue.collecting():
        y.backward()
    assert layer.weight.grad is None
    queue.run()
    assert expected is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)


def quantized(name: str) -> nn.Module:
    model = build(**WIDTHS)
    attach_quantizers(model, lambda _: RECIPES[name])
    for layer, quantizer in quantized_layers([model]):
        assert layer.weight is not None
        quantizer.set_weight_scales(layer.weight)
        if quantizer.input_scale is not None:
            quantizer.input_scale.fill_(1e-3 if name == "nvfp4" else 0.02)
    return model


def test_buffers_have_the_names_of_their_layer() -> None:
    names = {info_of(buffer).name for buffer in quantized("fp8").buffers()}
    assert "decoder.layers.1.mlp.linear_fc2.quantizer.weight_scale" in names
    assert "decoder.layers.0.self_attention.linear_qkv.quantizer.input_scale" in names
    assert not any("output_layer" in name or "embedding" in name for name in names)


@pytest.mark.parametrize("name", ["int8_sq", "fp8_blockwise", "int4_awq", "nvfp4"])
def test_stored_codes_give_the_same_output(name: str) -> None:
    model = quantized(name)
    with torch.no_grad():
        expected = model(*tokens(), None)
        store_weights([model])
        weights = [layer.weight for layer, _ in quantized_layers([model])]
        assert all(w is not None and w.untyped_storage().nbytes() <= 8 for w in weights)
        assert torch.equal(model(*tokens(), None), expected)
        with restored_parameters([model]):
            assert torch.equal(model(*tokens(), None), expected)
            layer, quantizer = next(quantized_layers([model]))
            assert layer.weight is not None
            layer.weight *= 2
            quantizer.weight_scale *= 2
        assert not torch.equal(model(*tokens(), None), expected)


def test_a_layer_that_the_format_cannot_represent_is_refused() -> None:
    model = build()
    with pytest.raises(ConfigError, match="no multiple of 128.*int8_sq.*--kitchen-config-file"):
        attach_quantizers(model, lambda _: RECIPES["int4_awq"])
