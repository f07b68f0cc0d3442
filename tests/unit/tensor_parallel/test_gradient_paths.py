"""Gradients of layers in the gradient buffer, through autograd or fused, on one of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests.support import tolerances
from tests.support.one_process import one_rank, tiny_config


@pytest.fixture
def groups() -> Iterator[ProcessGroupCollection]:
    """The groups of the first of two data-parallel ranks; collectives change nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield create_process_groups(*make_grids(2))
    dist.destroy_process_group()


class Layers(nn.Module):
    """A column layer that runs ``times`` times, and a row layer."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times
        more: Any = {"init_method": Init("normal", 0.1), "tp_group": one_rank()}
        self.first = ColumnParallelLinear(6, 6, config=tiny_config(), **more)
        self.second = RowParallelLinear(6, 4, config=tiny_config(), **more)
        torch.manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x, _ = self.first(x)
        y: Tensor = self.second(x)[0]
        return y


def wrap(
    model: nn.Module, groups: ProcessGroupCollection, **changes: Any
) -> DistributedDataParallel:
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    config = tiny_config(**{"gradient_accumulation_fusion": True, **changes})
    return DistributedDataParallel(config, ddp_config, model, pg_collection=groups)


def inputs(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, 3, 6, requires_grad=True)


def gradients(wrapper: DistributedDataParallel, *, is_constant: bool = False) -> dict[str, Tensor]:
    """Return gradients of the second of two steps with two micro-batches.

    ``is_constant``: the inputs require no gradient.
    """
    for step in range(2):
        wrapper.zero_grad_buffer()
        for microbatch in range(2):
            with wrapper.no_sync() if microbatch == 0 else torch.enable_grad():
                x = inputs(10 * step + microbatch).requires_grad_(not is_constant)
                wrapper(x).square().sum().backward()
        assert all(bucket.is_started for bucket in wrapper.buckets)
        wrapper.finish_grad_sync()
    return {n: p.main_grad.clone() for n, p in wrapper.module.named_parameters()}


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_gradients_are_means_of_those_without_a_wrapper(
    groups: ProcessGroupCollection, times: int, is_constant: bool
) -> None:
    found = gradients(wrap(Layers(times), groups), is_constant=is_constant)
    model = Layers(times)
    for microbatch in (10, 11):
        model(inputs(microbatch)).square().sum().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None
        torch.testing.assert_close(found[name], param.grad / 2)


@pytest.mark.parametrize("name", ["first.bias", "second.bias"])
def test_hooks_of_a_parameter_run(groups: ProcessGroupCollection, name: str) -> None:
    wrapper = wrap(Layers(), groups)
    expected = gradients(wrapper)
    param = wrapper.module.get_parameter(name)
    calls: list[Tensor] = []
    param.register_hook(lambda grad: 2 * grad)
    param.register_post_accumulate_grad_hook(calls.append)
    hooked = gradients(wrapper)
    assert len(calls) == 4
    torch.testing.assert_close(hooked.pop(name), 2 * expected.pop(name))
    torch.testing.assert_close(hooked, expected, **tolerances.BITWISE)


@pytest.mark.parametrize("fusion", [True, False])
def test_a_second_wrapper_of_a_module_gets_its_gradients(
    groups: ProcessGroupCollection, fusion: bool
) -> None:
    model = Layers()
    expected = gradients(wrap(model, groups))
    second = wrap(model, groups, gradient_accumulation_fusion=fusion)
    # Without fusion autograd adds a rounded product: the GEMM that adds rounds elsewhere.
    allowed = tolerances.BITWISE if fusion else tolerances.of(torch.float32)
    torch.testing.assert_close(gradients(second), expected, **allowed)


def test_a_queue_gets_the_gradients_of_its_layers(groups: ProcessGroupCollection) -> None:
    wrapper = wrap(Layers(), groups)
    expected = gradients(wrapper)
    queue = WeightGradQueue()
    wrapper.zero_grad_buffer()
    for microbatch in range(2):
        with queue.collecting():
            wrapper(inputs(10 + microbatch)).square().sum().backward()
    assert len(queue) == 4
    with wrapper.no_sync():
        queue.run()
    wrapper.finish_grad_sync()
    found = {n: p.main_grad for n, p in wrapper.module.named_parameters()}
    torch.testing.assert_close(found, expected, **tolerances.BITWISE)


def test_a_frozen_parameter_gets_none(groups: ProcessGroupCollection) -> None:
    wrapper = wrap(Layers(), groups)
    wrapper.module.second.bias.requires_grad_(False)
    wrapper.zero_grad_buffer()
    wrapper(inputs(0)).square().sum().backward()
    wrapper.finish_grad_sync()
    grads = {n: bool(p.main_grad.any()) for n, p in wrapper.module.named_parameters()}
    assert grads == {n: n != "second.bias" for n in grads}
