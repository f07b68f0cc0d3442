"""A layer with products of 8 or 4 bits against fp64, and what it remembers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.fusions.quantize import quantize
from megatron.core.fusions.quantize import quantize as fused_quantize
from megatron.core.low_precision import E4M3, Scaled, power_of_two
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel import quantized_linear
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.quantized_linear import (
    LinearQuantizer,
    Recipe,
    update_amax_histories,
)
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from megatron.core.transformer.low_precision import recipe_of, stays_in_bf16
from tests.support import tolerances
from tests.support.one_process import one_process_groups, one_rank, tiny_config
from tests.unit.test_low_precision import error_bound

RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "e4m3": {"fp8": "e4m3", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1"},
}
TOKENS, IN, OUT = (24, 2), 64, 32


def make(name: str = "delayed", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A layer of ``name``, in training."""
    config = tiny_config(params_dtype=dtype, **RECIPES[name] | changes)
    layer = ReplicatedLinear(IN, OUT, config=config, init_method=Init("normal", 1), bias=True)
    with torch.no_grad():
        layer.weight.copy_(draw(OUT, IN))
        layer.bias.copy_(draw(OUT, seed=1))
    recipe = recipe_of(config)
    assert recipe is not None
    layer.quantizer = LinearQuantizer(recipe, layer.weight, amax_group=one_rank(), is_expert=False)
    return layer


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound_of_product(a: Tensor, errors_a: Tensor, b: Tensor, errors_b: Tensor) -> Tensor:
    """How far a b^T may be off, if every term is off by its factors' errors."""
    a, b = a.abs(), b.abs()
    return errors_a @ b.t() + a @ errors_b.t() + errors_a @ errors_b.t()


@pytest.mark.feature("Precision: fp8 and fp4 products of layers, forward and twice backward")
@pytest.mark.parametrize("name", RECIPES)
def test_values_and_gradients_lie_within_the_formats_bound(name: str) -> None:
    layer = make(name)
    recipe: Recipe = layer.quantizer.recipe
    x, g = draw(*TOKENS, IN, seed=2).requires_grad_(), draw(*TOKENS, OUT, seed=3)
    y = layer(x)[0]
    y.backward(g)
    size, rows, flat_g = recipe.block, x.detach().flatten(0, 1), g.flatten(0, 1)
    w = layer.weight.detach()
    along = None if size is None else (1, size)
    square = (size, size) if size is not None and recipe.has_square_blocks else along

    def errors(t: Tensor, to: Any, block: Any) -> Tensor:
        bound = error_bound(t, to, block)
        # What is rounded at random may go to the farther neighbour.
        return 2 * bound if recipe.is_fp4 and to is recipe.backward and t is not w else bound

    ex, ew = errors(rows, recipe.forward, along), errors(w, recipe.forward, square)
    eg = errors(flat_g, recipe.backward, along)
    error = (y - (x @ w.t() + layer.bias)).detach().flatten(0, 1).abs()
    assert (error <= bound_of_product(rows, ex, w, ew)).all()
    assert error.max() > 0
    ew = errors(w.t(), recipe.forward, square)
    error = (x.grad - g @ w).flatten(0, 1).abs()
    assert (error <= bound_of_product(flat_g, eg, w.t(), ew)).all()
    if recipe.is_fp4:  # the operands of the last product are mixed before they are rounded
        relative = (layer.weight.grad - flat_g.t() @ rows).norm() / (flat_g.t() @ rows).norm()
        assert relative < 2.0**-2 * 2
    else:
        ex, eg = errors(rows.t(), recipe.forward, along), errors(flat_g.t(), recipe.backward, along)
        error = (layer.weight.grad - flat_g.t() @ rows).abs()
        assert (error <= bound_of_product(flat_g.t(), eg, rows.t(), ex)).all()
    torch.testing.assert_close(layer.bias.grad, flat_g.sum(0), **tolerances.of(torch.float64))


@pytest.mark.parametrize("name", RECIPES)
def test_the_weight_gradient_may_stay_in_the_higher_precision(name: str) -> None:
    layer = make(name, fp8_wgrad=False)
    x, g = draw(*TOKENS, IN, seed=2), draw(*TOKENS, OUT, seed=3)
    layer(x)[0].backward(g)
    want = g.flatten(0, 1).t() @ x.flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad, want, **tolerances.of(torch.float64))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("goes", ["to a queue", "to main_grad"])
def test_the_weight_gradient_goes_where_others_go(name: str, goes: str) -> None:
    plain, layer = make(name, torch.float32), make(name, torch.float32)
    x, g = draw(*TOKENS, IN, seed=2).float(), draw(*TOKENS, OUT, seed=3).float()
    for _ in range(2):
        plain(x)[0].backward(g)
    if goes == "to a queue":
        queue = WeightGradQueue()
        for _ in range(2):
            with queue.collecting():
                layer(x)[0].backward(g)
        assert layer.weight.grad is None
        queue.run()
        found = layer.weight.grad
    else:
        layer.weight.main_grad = torch.full((OUT, IN), 7.0)
        layer.weight.overwrite_main_grad, layer.weight.grad_added_to_main_grad = True, False
        for _ in range(2):
            layer(x)[0].backward(g)
        assert layer.weight.grad_added_to_main_grad
        found = layer.weight.main_grad
    torch.testing.assert_close(found, plain.weight.grad, **tolerances.of(torch.float32))


def test_no_tokens_and_frozen_weights() -> None:
    for name in RECIPES:
        layer = make(name)
        x = draw(0, IN).requires_grad_()
        layer(x)[0].sum().backward()
        assert x.grad is not None
        assert not layer.weight.grad.any()
        layer.weight.requires_grad_(False)
        x = draw(3, IN).requires_grad_()
        layer(x)[0].sum().backward()
        assert x.grad is not None


def step(layer: Any, *micro_batches: tuple[float, float]) -> list[Tensor]:
    """Forward and backward passes on values of these sizes; the results."""
    results = []
    for size, grad_size in micro_batches:
        x = torch.full((*TOKENS, IN), 1.0, dtype=torch.float64)
        x[0, 0, 0] = size
        g = torch.full((*TOKENS, OUT), grad_size, dtype=torch.float64)
        results.append(layer(x)[0].detach())
        layer(x)[0].backward(g)
    update_amax_histories([layer], one_process_groups())
    return results


@pytest.mark.feature("Precision: delayed scaling by a history of largest values, which is saved")
@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_delayed_scaling_by_hand(algorithm: str) -> None:
    layer = make(fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm, fp8_margin=1)
    history = layer.quantizer.amax_history
    step(layer, (4.0, 0.5), (8.0, 0.25))
    assert history.tolist() == [[8.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
    step(layer, (2.0, 3.0))
    step(layer, (5.0, torch.inf))  # what is not finite repeats the newest
    assert history.tolist() == [[5.0, 2.0, 8.0], [3.0, 3.0, 0.5]]
    layer.eval()
    layer(torch.full((*TOKENS, IN), 99.0, dtype=torch.float64))[0]
    layer.train()
    update_amax_histories([layer], one_process_groups())  # nothing was seen: repeated too
    assert history.tolist() == [[5.0, 5.0, 2.0], [3.0, 3.0, 3.0]]
    # 1000 is not known yet: it is cut off at what the scale of 5 leaves room for, with its margin.
    x = torch.zeros(*TOKENS, IN, dtype=torch.float64)
    x[0, 0, 0] = 1000.0
    scale = power_of_two(torch.tensor(5.0), 448.0, 1)
    w = quantize(layer.weight.detach(), E4M3).values(torch.float64)
    want = w[:, 0] * 448.0 * scale + layer.bias.detach()
    torch.testing.assert_close(layer(x)[0].detach()[0, 0], want, **tolerances.of(torch.float64))
    x[0, 0, 1] = torch.inf
    assert layer(x)[0][0, 0].isnan().all()


def test_a_weight_is_quantized_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[torch.Size] = []

    def count(x: Tensor, *args: Any, **kwargs: Any) -> Scaled:
        counted.append(x.shape)
        return fused_quantize(x, *args, **kwargs)

    monkeypatch.setattr(quantized_linear, "quantize", count)
    for name, orientations in (("tensorwise", 1), ("blockwise", 1), ("mxfp8", 2)):
        layer = make(name)
        x = draw(*TOKENS, IN).requires_grad_()

        def passes(layer: Any = layer, x: Tensor = x) -> int:
            counted.clear()
            for _ in range(2):
                layer(x)[0].sum().backward()
            return counted.count(torch.Size((OUT, IN)))

        assert passes() == 2 * 2  # no wrapper keeps whole weights: for each pass anew
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        before = layer(x)[0].detach()
        assert passes() == orientations - 1
        assert passes() == 0
        with torch.no_grad():
            layer.weight.detach().mul_(2)
        assert passes() == orientations
        assert not torch.equal(layer(x)[0], before)
        torch.autograd.graph.increment_version(layer.weight)
        assert passes() == orientations


@pytest.mark.feature("Precision: transposed fp8 weights are kept between micro-batches")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transposed_weight_is_kept_for_a_step(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(*TOKENS, IN).to(dtype).requires_grad_()
    g = (draw(*TOKENS, OUT, seed=1) / 8).to(dtype)  # results near 1, as the tolerance expects
    # The layouts of the operands differ, so that their GEMMs may add in different orders.
    allowed = tolerances.of(dtype)

    def gradients(layer: Any) -> list[Tensor | None]:
        x.grad = layer.weight.grad = None
        layer(x)[0].backward(g)
        return [x.grad, layer.weight.grad]

    usual, keeping = make(name, dtype), make(name, dtype)
    keeping.quantizer.keeps_transposed = True
    for _ in range(2):
        torch.testing.assert_close(gradients(keeping), gradients(usual), **allowed)
        kept = keeping.quantizer._transposed
        assert kept.codes.shape == (IN, OUT)
        assert kept.codes.is_contiguous()
    with torch.no_grad():
        keeping.weight.mul_(2)
    # Within a step nothing changes.
    torch.testing.assert_close(gradients(keeping)[0], gradients(usual)[0], **allowed)
    update_amax_histories([keeping], one_process_groups())
    difference = gradients(keeping)[0] - gradients(usual)[0]
    assert difference.norm() > 0.5 * x.grad.norm()
    keeping.weight.main_grad = torch.zeros_like(keeping.weight)  # whole weights say what they are
    keeping.weight.overwrite_main_grad, keeping.weight.grad_added_to_main_grad = True, False
    with torch.no_grad():
        keeping.weight.mul_(0.5)
    torch.testing.assert_close(gradients(keeping)[0], gradients(usual)[0], **allowed)


def test_first_and_last_layers_may_stay_in_bf16() -> None:
    config = tiny_config(num_layers=6, fp8="hybrid", first_last_layers_bf16=True)
    assert [stays_in_bf16(config, i) for i in range(6)] == [True, *[False] * 4, True]
    config = tiny_config(
        num_layers=6,
        fp8="hybrid",
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=2,
    )
    assert [stays_in_bf16(config, i) for i in range(6)] == [*[False] * 4, True, True]
