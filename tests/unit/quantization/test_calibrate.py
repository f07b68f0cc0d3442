"""Calibration of a trained model: perplexity, observers, folding and per-layer recipes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.quantization.calibrate import calibrate, gptq
from megatron.core.quantization.formats import (
    FP8_TENSOR,
    INT4_GROUP,
    RECIPES,
    NumberFormat,
    codes_of,
    scales_of,
    values_of,
)
from megatron.core.quantization.observers import OBSERVERS, ObserverKind, RangeObserver
from megatron.core.quantization.quant_config import LayerRecipes, layer_recipes, text_of_globs
from megatron.core.quantization.quantizer import attach_quantizers, quantized_layers
from tests.support.one_process import one_process_groups
from tests.unit.models.test_gpt_model import LENGTH, VOCABULARY, build

STEPS = 60


def texts(count: int, seed: int) -> Tensor:
    """Sequences of a random walk through the vocabulary: [count, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (count, LENGTH + 1), generator=generator)
    return steps.cumsum(1).square() % VOCABULARY


def loss_of(model: GPTModel, rows: Tensor) -> Tensor:
    positions = torch.arange(LENGTH).expand(len(rows), LENGTH)
    logits = model(rows[:, :-1], positions, None)
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def new() -> GPTModel:
    return build(
        hidden_size=128, ffn_hidden_size=256, init_method_std=0.05, add_qkv_bias=True,
        model={"share_embeddings_and_output_weights": False},
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained() -> GPTModel:
    model = new()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, texts(32, step)).backward()
        optimizer.step()
    with torch.no_grad():  # the same function with outlier channels, as large models have them
        for layer in model.decoder.layers:
            attention, mlp = layer.self_attention, layer.mlp
            for norm, linear in (
                (layer.input_layernorm, attention.linear_qkv),
                (layer.pre_mlp_layernorm, mlp.linear_fc1),
            ):
                norm.weight[5:9] *= 12
                linear.weight[:, 5:9] /= 12
    return model.eval()


def calibrated(model: GPTModel, recipes: LayerRecipes, observer: ObserverKind = "max") -> GPTModel:
    state = model.state_dict()
    model = new().eval()
    model.load_state_dict(state)
    attach_quantizers(model, recipes)
    samples = texts(64, 1000)
    calibrate([model], lambda: loss_of(model, samples), one_process_groups(), observer=observer)
    return model


HELD_OUT = texts(128, 5000)


@torch.no_grad()
def error(model: GPTModel, expected: GPTModel) -> float:
    """The mean squared error of the log-probabilities of held-out tokens."""
    positions = torch.arange(LENGTH).expand(len(HELD_OUT), LENGTH)
    ours, theirs = (m(HELD_OUT[:, :-1], positions, None).log_softmax(-1) for m in (model, expected))
    return float((ours - theirs).square().mean())


LARGEST = {"int4_awq": 0.03, "w4a8_awq": 0.03, "nvfp4": 0.03, "int4_gptq": 0.03, "int4": 0.1}


@pytest.mark.feature("Quantization: perplexity of every recipe near that of the trained model")
@pytest.mark.parametrize("recipe", [name for name in RECIPES if "real" not in name])
@torch.no_grad()
def test_perplexity_stays_near_that_of_the_trained_model(trained: GPTModel, recipe: str) -> None:
    before = loss_of(trained, HELD_OUT)
    assert before < 0.5 * math.log(VOCABULARY)
    after = loss_of(calibrated(trained, lambda _: RECIPES[recipe]), HELD_OUT)
    assert abs((after - before).exp() - 1) < LARGEST.get(recipe, 0.005)


def test_each_algorithm_is_better_than_rounding_to_nearest(trained: GPTModel) -> None:
    errors = {
        name: error(calibrated(trained, lambda _, r=recipe: r), trained)  # type: ignore[misc]
        for name, recipe in {
            **RECIPES,
            "int8 nearest": replace(RECIPES["int8_sq"], algorithm="max"),
        }.items()
        if name in ("int4", "int4_awq", "int4_gptq", "int8_sq", "int8 nearest")
    }
    assert errors["int4_awq"] < 0.8 * errors["int4"]
    assert errors["int4_gptq"] < 0.5 * errors["int4"]
    assert errors["int8_sq"] < 0.8 * errors["int8 nearest"]


@pytest.mark.parametrize("recipe", ["int8_sq", "int4_awq"])
def test_folded_factors_do_not_change_the_model(trained: GPTModel, recipe: str) -> None:
    model = calibrated(trained, lambda _: RECIPES[recipe])
    changed = 0
    for layer, quantizer in quantized_layers([model]):
        layer.quantizer = None
        changed += quantizer is not None
    assert changed == 8
    assert error(model, trained) < 1e-9
    before = dict(trained.named_parameters())
    same = [n for n, p in model.named_parameters() if n in before and torch.equal(p, before[n])]
    assert not any("linear" in name and "weight" in name for name in same)


def test_gptq_equals_rounding_to_nearest_for_independent_inputs() -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    values, scale = gptq(weight, torch.eye(256), INT4_GROUP)
    expected, _ = scales_of(weight, INT4_GROUP)
    torch.testing.assert_close(scale, expected)
    codes = codes_of(weight, expected, INT4_GROUP)
    torch.testing.assert_close(values, values_of(codes, expected, INT4_GROUP, dtype=torch.float32))


@pytest.mark.parametrize("kind", OBSERVERS)
@pytest.mark.parametrize("to", [NumberFormat("int", 8), NumberFormat("int", 4), FP8_TENSOR])
def test_observers_bound_the_range_of_inputs(kind: ObserverKind, to: NumberFormat) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(20_000, generator=generator)
    x[7] = 30.0
    observer = RangeObserver(x.device, kind)
    for _ in range(2):
        for part in x.chunk(3):
            observer(part)
        observer.end_first_pass()
    found = float(observer.range(to))
    if kind == "max":
        assert found == 30
    elif kind == "percentile":
        assert found == pytest.approx(float(x.abs().quantile(0.9999)), rel=0.02)
    elif to.kind == "int":
        assert found < (30 if to.bits == 8 else 8)
    assert 0 < found <= 30


def test_globs_choose_the_recipe_of_each_layer(trained: GPTModel, tmp_path: Path) -> None:
    file = tmp_path / "recipes.yaml"
    file.write_text('"*.layers.0.*": none\n"*.linear_fc1": int8\n')
    recipes = layer_recipes("fp8", str(file))
    assert recipes is not None
    found = [
        (q.recipe.name, layer) for layer, q in quantized_layers([calibrated(trained, recipes)])
    ]
    assert sorted(name for name, _ in found) == ["fp8", "fp8", "fp8", "int8"]
    assert recipes("output_layer") is None
    file.write_text(
        "matchers:\n"
        '  a: {type: glob, pattern: "*.linear_qkv", config: first, enabled: true}\n'
        '  b: {type: glob, pattern: "*", config: second, enabled: false}\n'
        "configs:\n  first: {recipe: int4_awq}\n  second: {recipe: fp8}\n"
    )
    recipes = layer_recipes(None, str(file))
    assert recipes is not None
    names = [recipes(f"decoder.layers.0.self_attention.{n}") for n in ("linear_qkv", "linear_proj")]
    assert names == [RECIPES["int4_awq"], None]
    assert text_of_globs(str(file)) == '{"*.linear_qkv": "int4_awq"}'
    assert text_of_globs('{"*.linear_qkv": "int4_awq"}') == '{"*.linear_qkv": "int4_awq"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"*": int5\n', "it has int5, which is no recipe: give recipe: and one of int8_sq"),
        ("[]\n", "neither globs of layers nor matchers"),
        (
            'matchers:\n  a: {type: glob, pattern: "*", config: k, enabled: true}\n'
            "configs:\n  k: {kitchen_config_type: QLinearParams, recipe_idx: 1}\n",
            "config k has .*, which is no recipe",
        ),
        ("matchers:\n  a: {enabled: true}\n", "matcher a needs type, pattern and config"),
    ],
)
def test_a_file_of_globs_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "recipes.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        layer_recipes("fp8", str(file))


def test_layers_that_calibration_does_not_run_have_no_recipe() -> None:
    recipe_of = layer_recipes("fp8", None)
    assert recipe_of is not None
    assert recipe_of("decoder.layers.0.mlp.linear_fc1") is RECIPES["fp8"]
    for name in ("mtp.layers.0.eh_proj", "mtp.layers.0.transformer_layer.mlp.linear_fc1"):
        assert recipe_of(name) is None


def test_samples_without_a_token_for_a_layer_are_refused(trained: GPTModel) -> None:
    model = new()
    attach_quantizers(model, lambda _: RECIPES["fp8"])
    run: Callable[[], object] = lambda: None  # noqa: E731
    with pytest.raises(ConfigError, match="no token, .* for 8 layers .*: give more samples"):
        calibrate([model], run, one_process_groups())


@pytest.mark.parametrize(
    ("recipe", "bad", "message"),
    [
        ("int8", "decoder.layers.1.mlp.linear_fc2.weight", "--load: the weights of 1 layers"),
        ("fp8", "embedding.word_embeddings.weight", "not finite for 8 layers"),
        ("int8_sq", "embedding.word_embeddings.weight", "not finite for 8 layers"),
        ("int4_gptq", "embedding.word_embeddings.weight", "not finite for 8 layers"),
    ],
)
def test_a_model_with_nan_is_refused(recipe: str, bad: str, message: str) -> None:
    model = new()
    attach_quantizers(model, lambda _: RECIPES[recipe])
    model.get_parameter(bad).detach()[3:] = float("nan")
    with pytest.raises(ConfigError, match=message):
        calibrate([model], lambda: loss_of(model, texts(2, 0)), one_process_groups())
