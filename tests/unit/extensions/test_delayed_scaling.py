"""Delayed scaling by Transformer Engine: the scales, histories and values of our own layers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.extensions import transformer_engine as te
from megatron.core.extensions.transformer_engine import delayed_scaling
from megatron.core.params.param_info import info_of
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.quantized_linear import update_amax_histories
from megatron.core.transformer.low_precision import recipe_of
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import tolerances
from tests.support.fake_transformer_engine import DelayedScaling, installed
from tests.support.one_process import one_process_groups, one_rank, tiny_config

LAYERS = {
    "column": (te.TEColumnParallelLinear, ColumnParallelLinear),
    "row": (te.TERowParallelLinear, RowParallelLinear),
}


def config_of(**changes: Any) -> TransformerConfig:
    return tiny_config(params_dtype=torch.float64, fp8="hybrid", fp8_recipe="delayed", **changes)


def layer_of(kind: type[Any], config: TransformerConfig) -> Any:
    layer = kind(
        32, 16, config=config, init_method=config.init_method, bias=False, tp_group=one_rank()
    )
    with torch.no_grad():
        torch.manual_seed(3)
        layer.weight.normal_(std=0.3)
    recipe = recipe_of(config)
    assert recipe is not None
    layer.quantize(recipe, one_rank())
    return layer


def values_of_step(layer: Any, step: int) -> list[Tensor]:
    """Outputs and gradients of two micro-batches, the second ones larger than the first."""
    found = []
    for size in (1.0, 3.0):
        torch.manual_seed(step)
        x = (size * torch.randn(4, 2, 32, dtype=torch.float64)).requires_grad_()
        grad = 1e-5 * size * torch.randn(4, 2, 16, dtype=torch.float64)
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        found += [y.detach(), *torch.autograd.grad(y, [x, layer.weight], grad)]
    with torch.no_grad():
        layer.weight.mul_(1.5)
    return found


@pytest.mark.feature("Precision: delayed scaling by Transformer Engine, with histories that resume")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_the_package_rounds_as_our_own_layers(name: str, algorithm: str) -> None:
    config = config_of(fp8_amax_history_len=2, fp8_amax_compute_algo=algorithm, fp8_margin=1)
    theirs, ours = LAYERS[name]
    with installed() as calls:
        both = [layer_of(kind, config) for kind in (theirs, ours)]
        for step in range(3):
            found, expected = (values_of_step(layer, step) for layer in both)
            for layer in both:
                update_amax_histories([layer], one_process_groups())
            histories = [layer.quantizer.amax_history for layer in both]
            torch.testing.assert_close(histories[0], histories[1], rtol=1e-6, atol=0)
            if step:  # our own layers scale by the current values while there is no history
                for have, want in zip(found, expected, strict=True):
                    torch.testing.assert_close(have, want, **tolerances.of(torch.float64))
    recipe = calls[-1]["recipe"]
    assert recipe == DelayedScaling(1, "hybrid", 2, algorithm)


def test_gradients_are_not_zero_without_a_history() -> None:
    with installed():
        layer = layer_of(te.TEColumnParallelLinear, config_of())
        *_, of_x, of_weight = values_of_step(layer, 0)
    assert of_x.abs().max() > 0
    assert of_weight.abs().max() > 0


def test_an_evaluation_leaves_no_amax_value() -> None:
    with installed():
        seen, unseen = (layer_of(te.TEColumnParallelLinear, config_of()) for _ in range(2))
        for layer in (seen, unseen):
            values_of_step(layer, 0)
            update_amax_histories([layer], one_process_groups())
        with torch.no_grad():
            seen.eval()(torch.full((4, 2, 32), 100.0, dtype=torch.float64))
        seen.train()
        for layer in (seen, unseen):
            values_of_step(layer, 1)
            update_amax_histories([layer], one_process_groups())
    assert torch.equal(seen.quantizer.amax_history, unseen.quantizer.amax_history)


def test_a_history_has_the_key_of_our_own_layers_and_loads_into_them() -> None:
    config = config_of()
    with installed():
        theirs, ours = (layer_of(kind, config) for kind in LAYERS["column"])
        values_of_step(theirs, 0)
        update_amax_histories([theirs], one_process_groups())
    kept = [name for name, _ in theirs.named_buffers() if name.endswith("amax_history")]
    assert kept == ["quantizer.amax_history"]
    assert info_of(theirs.quantizer.amax_history) == info_of(ours.quantizer.amax_history)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.quantizer.amax_history, theirs.quantizer.amax_history)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"enable_cuda_graph": True}, "--fp8-recipe delayed: a captured graph"),
        ({"num_moe_experts": 2, "moe_grouped_gemm": True}, "--fp8-recipe delayed with --moe-gro"),
        ({"fp8_wgrad": False}, "--no-fp8-wgrad"),
    ],
)
def test_our_own_layers_compute_what_the_package_cannot(changes: dict[str, Any], flag: str) -> None:
    assert config_of().why_own_matrices is None
    assert str(replace(config_of(), **changes).why_own_matrices).startswith(flag)


def test_the_package_has_the_names_that_scales_are_set_by() -> None:
    place = importlib.util.find_spec("transformer_engine")  # without importing it
    if place is None or place.origin is None:
        pytest.skip("transformer-engine is not installed: its wheel is part of the dev extra")
    folder = Path(place.origin).parent / "pytorch"
    base = (folder / "module/base.py").read_text()
    for name in (delayed_scaling._FORWARD, delayed_scaling._BACKWARD):
        assert f'"{name}"' in base
    assert "def init_fp8_metadata(self, num_gemms: int = 1)" in base
    assert f'"{delayed_scaling._IS_LISTED}"' in (folder / "quantization.py").read_text()
