"""Layers with 8-bit products on two ranks against one process: what is cut decides no rounding.

In fp64, so that sums in another order do not move a value over the edge between two codes.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import param_buffer
from megatron.core.distributed.buffer_plan import plan_buffer
from megatron.core.distributed.param_buffer import make_param_buckets
from megatron.core.fusions.quantize import quantize
from megatron.core.low_precision import E4M3
from megatron.core.parallel.collectives import all_gather_single
from megatron.core.params.param_info import ParamInfo, set_info
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.quantized_linear import LinearQuantizer, update_amax_histories
from megatron.core.transformer.low_precision import recipe_of
from tests.support import tolerances
from tests.support.one_process import one_process_groups, one_rank, tiny_config
from tests.support.ranks import run_ranks
from tests.unit.tensor_parallel.test_quantized_linear import RECIPES, draw

NUMELS = (96, 5, 300)
WIDTH, INNER, TOKENS = 64, 128, (64, 2)
TIGHT = tolerances.of(torch.float64)


def build(group: Any, name: str, sequence_parallel: bool) -> list[Any]:
    """A column layer and a row layer behind it, as one rank of ``group`` has them."""
    config = tiny_config(
        params_dtype=torch.float64, sequence_parallel=sequence_parallel, **RECIPES[name]
    )
    recipe = recipe_of(config)
    assert recipe is not None
    common: Any = {"config": config, "init_method": Init("normal", 1), "tp_group": group}
    layers: list[Any] = [
        ColumnParallelLinear(WIDTH, INNER, **common),
        RowParallelLinear(INNER, WIDTH, **common),
    ]
    for dim, layer in enumerate(layers):
        shape = (INNER, WIDTH) if dim == 0 else (WIDTH, INNER)
        with torch.no_grad():
            whole = draw(*shape, seed=dim)
            layer.weight.copy_(whole.chunk(group.size(), dim)[group.rank()])
            layer.bias.zero_()
        layer.quantizer = LinearQuantizer(recipe, layer.weight, amax_group=group, is_expert=False)
    return layers


def run(layers: list[Any], x: Tensor, g: Tensor) -> list[Tensor]:
    """y, its input's gradient, those of both weights."""
    x = x.clone().requires_grad_()
    inner, _ = layers[0](x)
    y, _ = layers[1](torch.nn.functional.gelu(inner))
    for layer in layers:
        layer.weight.grad = None
    y.backward(g)
    assert x.grad is not None
    return [y.detach(), x.grad, *(layer.weight.grad for layer in layers)]


def two_steps(rank: int, world_size: int, name: str, sequence_parallel: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    alone, cut = build(one_rank(), name, False), build(group, name, sequence_parallel)
    groups = one_process_groups()
    there = type(groups)(**{**vars(groups), "tp_dp_cp": group})
    for step in range(2):
        x, g = draw(*TOKENS, WIDTH, seed=2 + step), draw(*TOKENS, WIDTH, seed=8 + step)
        want = run(alone, x, g)
        if sequence_parallel:
            half = slice(rank * TOKENS[0] // 2, (rank + 1) * TOKENS[0] // 2)
            x, g, want[0], want[1] = x[half], g[half], want[0][half], want[1][half]
        have = run(cut, x, g)
        for dim in (0, 1):
            want[2 + dim] = want[2 + dim].chunk(2, dim)[rank]
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a, b, **TIGHT)
        update_amax_histories(alone, groups)
        update_amax_histories(cut, there)
    if name == "delayed":
        for a, b in zip(cut, alone, strict=True):
            assert torch.equal(a.quantizer.amax_history, b.quantizer.amax_history)
            assert a.quantizer.amax_history.all()


@pytest.mark.feature("Precision: fp8 layers give the same numbers on tensor-parallel ranks")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_two_ranks_round_as_one(name: str, sequence_parallel: bool) -> None:
    run_ranks(two_steps, 2, name, sequence_parallel)


def gather(rank: int, world_size: int) -> list[torch.dtype]:
    """Ranks update their shares of three weights in two buckets; what their gathers moved."""
    group = dist.group.WORLD
    assert group is not None
    params = [nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in NUMELS]
    for param in params:
        set_info(param, ParamInfo(global_shape=(param.numel(),), gathered_as_codes=True))
    layout = plan_buffer(NUMELS, 200, param_alignment=64, bucket_multiple=2 * 128)
    _, buckets = make_param_buckets(params, layout, group, one_rank())
    assert len(buckets) == 2
    moved: list[torch.dtype] = []

    def all_gather(out: Tensor, share: Tensor, **options: Any) -> Any:
        moved.append(out.dtype)
        return all_gather_single(out, share, **options)

    for step in range(2):
        want = []
        for (start, stop), param in zip(layout.spans, params, strict=True):
            whole = draw(stop - start, seed=start + step).bfloat16()
            want.append(quantize(whole.view(1, -1), E4M3).values(torch.bfloat16).view(-1))
            for bucket in buckets:
                bucket.prepare_update()
            with torch.no_grad():
                param.copy_(whole)
        versions = [param._version for param in params]
        for bucket in buckets:  # what other ranks own is old here
            share = len(bucket.data) // world_size
            for other in range(world_size):
                if other != rank:
                    bucket.data[other * share : (other + 1) * share] = 99.0
        with mock.patch.object(param_buffer, "all_gather_single", all_gather):
            for bucket in buckets:
                bucket.start()
            for bucket in buckets:
                bucket.finish()
                assert all(
                    p.isnan().all() and p.untyped_storage().nbytes() == 2 for p in bucket.params
                )
                bucket.restore_values()
        for param, values, version in zip(params, want, versions, strict=True):
            assert torch.equal(param, values)
            assert param._version > version
            again = quantize(param.detach().view(1, -1), E4M3).values(torch.bfloat16)
            assert torch.equal(again.view(-1), values)
    return moved


def test_updated_weights_travel_as_bytes() -> None:
    for moved in run_ranks(gather, 2):
        assert moved == [torch.uint8] * 4
