"""fp8 GEMMs fused with collectives of sequence parallelism: the bits of separate ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core import device
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel import overlap
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.overlap import overlap_layers
from megatron.core.tensor_parallel.quantized_linear import LinearQuantizer, update_amax_histories
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from megatron.core.transformer.low_precision import recipe_of
from tests.distributed.test_overlapped_linear import FLAGS
from tests.support.host_gpu import symmetric_memory
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks
from tests.unit.tensor_parallel.test_quantized_linear import RECIPES, draw

WIDTH = 32
INNER = 64
TOKENS = (8, 3)
CASES: dict[str, dict[str, Any]] = {
    "delayed": RECIPES["delayed"],
    "tensorwise": RECIPES["tensorwise"],
    "weight gradients in 16 bits": RECIPES["delayed"] | {"fp8_wgrad": False},
}


def build(
    group: Any, settings: dict[str, Any], dtype: torch.dtype, inner: int = INNER
) -> nn.ModuleList:
    """A column layer with bias and a row layer, as one rank of ``group`` has them."""
    config = tiny_config(params_dtype=dtype, sequence_parallel=True, **settings)
    recipe = recipe_of(config)
    assert recipe is not None
    common: Any = {"config": config, "init_method": Init("normal", 1), "tp_group": group}
    layers = nn.ModuleList(
        [ColumnParallelLinear(WIDTH, inner, **common), RowParallelLinear(inner, WIDTH, **common)]
    )
    for layer in layers:
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(draw(*param.shape, seed=group.rank()))
        layer.quantizer = LinearQuantizer(recipe, layer.weight, amax_group=group, is_expert=False)
    return layers


def two_steps(layers: nn.ModuleList, dtype: torch.dtype, *, later: bool) -> list[Tensor]:
    """y, and the gradients of its input and of all parameters, in both steps."""
    group = dist.group.WORLD
    assert group is not None
    groups = one_process_groups()
    groups = type(groups)(**{**vars(groups), "tp_dp_cp": group})
    found: list[Tensor] = []
    for step in range(2):
        seed = 2 * (2 * step + group.rank())
        x = draw(*TOKENS, WIDTH, seed=seed).to(dtype).requires_grad_()
        inner, _ = layers[0](x)
        y, _ = layers[1](torch.nn.functional.gelu(inner))
        queue = WeightGradQueue()
        for param in layers.parameters():
            param.grad = None
        if later:
            with queue.collecting():
                y.backward(draw(*y.shape, seed=seed + 1).to(dtype))
            queue.run()
        else:
            y.backward(draw(*y.shape, seed=seed + 1).to(dtype))
        assert x.grad is not None
        found += [y.detach(), x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]
        update_amax_histories([layers], groups)
    return found


def fused_and_separate(rank: int, world_size: int, case: str) -> dict[str, list[str]]:
    group = dist.group.WORLD
    kept = symmetric_memory.register("CPU")
    calls: dict[str, list[str]] = {}
    with (
        mock.patch.object(overlap, "_why_no_symmetric_memory", return_value=None),
        mock.patch.object(device, "multiplies_fp8", return_value=True),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            wanted = two_steps(build(group, CASES[case], dtype), dtype, later=False)
            assert len(wanted) == 2 * 6
            for name, flags in FLAGS.items():
                for later in (False, True):
                    layers = build(group, CASES[case], dtype)
                    assert overlap_layers(layers, group, tiny_config(**flags)) == (2, [])
                    symmetric_memory.calls.clear()
                    found = two_steps(layers, dtype, later=later)
                    for have, want in zip(found, wanted, strict=True):
                        assert torch.equal(have, want), name
                calls[name] = list(symmetric_memory.calls)
    del kept
    return calls


@pytest.mark.feature("Speed: --tp-comm-overlap fuses fp8 GEMMs with collectives of their codes")
@pytest.mark.parametrize("case", CASES)
def test_fused_layers_have_the_bits_of_separate_ones(case: str) -> None:
    gather = "scaled gather"
    scatter = "scaled scatter"
    gathers_gradients = [] if case == "weight gradients in 16 bits" else [gather]
    for calls in run_ranks(fused_and_separate, 2, case):
        assert calls["default"] == [gather, scatter, *gathers_gradients] * 2
        assert calls["all"] == [gather, scatter, *gathers_gradients, scatter] * 2
        assert calls["gathers"] == [gather, *gathers_gradients] * 2
        assert calls["scatters"] == [scatter] * 2
        assert calls["gradients"] == [scatter] * 2


BLOCKS: dict[str, dict[str, Any]] = {
    "mxfp8": {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
    "blockwise": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "fp4": {"fp4": "e2m1"},
}


def excluded(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    found = {}
    with mock.patch.object(overlap, "_why_no_symmetric_memory", return_value=None):
        delayed = build(group, CASES["delayed"], torch.bfloat16)
        found["no fp8"] = overlap_layers(delayed, group, tiny_config())
        with mock.patch.object(device, "multiplies_fp8", return_value=True):
            for name, settings in BLOCKS.items():
                layers = build(group, settings, torch.bfloat16)
                found[name] = overlap_layers(layers, group, tiny_config())
            narrow = build(group, CASES["delayed"], torch.bfloat16, inner=48)
            found["widths"] = overlap_layers(narrow, group, tiny_config())
            layers[0].quantizer = None  # --first-last-layers-bf16
            found["mixed"] = overlap_layers(layers, group, tiny_config())
    return found


def test_recipes_with_blocks_and_devices_without_fp8_keep_separate_collectives() -> None:
    takes = "torch's fused GEMMs take one"
    instead = "use --fp8-recipe tensorwise or delayed"
    fp8 = f"{takes} fp8 scale per tensor or row, not one for each {{}} values of a row: {instead}"
    fp4 = fp8.replace("fp8 scale", "fp4 scale").format(16)
    widths = "fused fp8 GEMMs need multiples of 16 in a rank's part of a weight, which has {}"
    for found in run_ranks(excluded, 2):
        assert found == {
            "no fp8": (0, ["this device has no GEMMs in fp8"]),
            "widths": (0, [widths.format((24, 32)), widths.format((32, 24))]),
            "mxfp8": (0, [fp8.format(32)]),
            "blockwise": (0, [fp8.format(128)]),
            "fp4": (0, [fp4]),
            "mixed": (1, [fp4]),
        }
