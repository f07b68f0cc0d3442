"""Gradients that layers pass to the gradient buffer without autograd, on one of two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.params.direct_gradient import through_autograd
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests import tolerances
from tests.unit.autograd_graph import parameters_of_graph
from tests.unit.one_process import one_rank, tiny_config


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
    return DistributedDataParallel(tiny_config(**changes), ddp_config, model, pg_collection=groups)


def inputs(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, 3, 6, requires_grad=True)


def gradients(
    wrapper: DistributedDataParallel, *, is_direct: bool = True, is_constant: bool = False
) -> dict[str, Tensor]:
    """Gradients of the second step, of two micro-batches each; ``is_constant``: of the inputs."""
    params = list(wrapper.parameters())
    for step in range(2):
        wrapper.zero_grad_buffer()
        for microbatch in range(2):
            with wrapper.no_sync() if microbatch == 0 else torch.enable_grad():
                x = inputs(10 * step + microbatch).requires_grad_(not is_constant)
                if is_direct:
                    wrapper(x).square().sum().backward()
                else:
                    with through_autograd(params):
                        y = wrapper(x)
                    y.square().sum().backward()
        assert all(bucket.is_started for bucket in wrapper.buckets)
        wrapper.finish_grad_sync()
    return {n: p.main_grad.clone() for n, p in wrapper.module.named_parameters()}


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_are_those_that_autograd_delivers(
    groups: ProcessGroupCollection, times: int
) -> None:
    """A parameter used twice too: its bucket is reduced after the second gradient."""
    ours = gradients(wrap(Layers(times), groups))
    expected = gradients(wrap(Layers(times), groups), is_direct=False)
    for name, grad in expected.items():
        # Autograd adds the two gradients of a bias before it adds them to the sum.
        torch.testing.assert_close(ours[name], grad, **({} if times > 1 else tolerances.BITWISE))


def test_a_layer_of_constant_inputs_and_of_its_own_outputs(groups: ProcessGroupCollection) -> None:
    """Autograd has the gradient of the first use, which comes after that of the second one."""
    ours = gradients(wrap(Layers(2), groups), is_constant=True)
    expected = gradients(wrap(Layers(2), groups), is_direct=False, is_constant=True)
    for name, grad in expected.items():
        torch.testing.assert_close(ours[name], grad)


def test_a_checkpoint_without_reentry_delays_no_reduction(groups: ProcessGroupCollection) -> None:
    """Its replay of the forward pass has no backward pass."""
    model = Layers()
    wrapper = wrap(model, groups)
    expected = gradients(wrapper)
    layer = model.first.forward
    model.first.forward = partial(checkpoint, layer, use_reentrant=False)  # type: ignore[method-assign]
    torch.testing.assert_close(gradients(wrapper), expected, **tolerances.BITWISE)


@pytest.mark.parametrize("name", ["first.bias", "second.bias"])
def test_hooks_of_a_parameter_run(groups: ProcessGroupCollection, name: str) -> None:
    wrapper = wrap(Layers(), groups)
    expected = gradients(wrapper)
    param = wrapper.module.get_parameter(name)
    calls: list[Tensor] = []
    handles = [
        param.register_hook(lambda grad: 2 * grad),
        param.register_post_accumulate_grad_hook(calls.append),
    ]
    hooked = gradients(wrapper)
    assert len(calls) == 4
    torch.testing.assert_close(hooked.pop(name), 2 * expected.pop(name))
    torch.testing.assert_close(hooked, expected, **tolerances.BITWISE)
    for handle in handles:
        handle.remove()
    assert not parameters_of_graph(wrapper(inputs(0)))


@pytest.mark.parametrize("fusion", [True, False])
def test_a_second_wrapper_of_a_module_gets_its_gradients(
    groups: ProcessGroupCollection, fusion: bool
) -> None:
    model = Layers()
    expected = gradients(wrap(model, groups))
    second = wrap(model, groups, gradient_accumulation_fusion=fusion)
    assert bool(parameters_of_graph(second(inputs(0)))) == (not fusion)
    # Without fusion autograd adds a rounded product: the GEMM that adds rounds elsewhere.
    allowed = tolerances.BITWISE if fusion else tolerances.of(torch.float32)
    torch.testing.assert_close(gradients(second), expected, **allowed)


def test_a_parameter_in_a_file_has_no_sink(groups: ProcessGroupCollection, tmp_path: Path) -> None:
    wrapper = wrap(Layers(), groups)
    torch.save(dict(wrapper.module.named_parameters()), tmp_path / "params.pt")
    loaded = torch.load(tmp_path / "params.pt", weights_only=False)
    for name, param in wrapper.module.named_parameters():
        torch.testing.assert_close(loaded[name], param, **tolerances.BITWISE)
        assert loaded[name].grad_sink is None


def test_autograd_has_no_node_for_parameters(groups: ProcessGroupCollection) -> None:
    wrapper = wrap(Layers(), groups)
    assert not parameters_of_graph(wrapper(inputs(0)))


def test_parameters_of_constant_inputs_get_their_gradients(
    groups: ProcessGroupCollection,
) -> None:
    wrapper = wrap(Layers(), groups)
    wrapper.zero_grad_buffer()
    y = wrapper(inputs(0).detach())
    first = wrapper.module.first
    assert parameters_of_graph(y) == {first.weight, first.bias}
    y.square().sum().backward()
    assert all(bucket.is_started for bucket in wrapper.buckets)
    assert all(p.main_grad.any() for p in wrapper.parameters())


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


def test_a_forward_pass_alone_delays_no_reduction_of_the_next_step(
    groups: ProcessGroupCollection,
) -> None:
    wrapper = wrap(Layers(), groups)
    wrapper(inputs(0))
    gradients(wrapper)


def test_a_frozen_parameter_gets_none(groups: ProcessGroupCollection) -> None:
    wrapper = wrap(Layers(), groups)
    wrapper.module.second.bias.requires_grad_(False)
    wrapper.zero_grad_buffer()
    wrapper(inputs(0)).square().sum().backward()
    wrapper.finish_grad_sync()
    grads = {n: bool(p.main_grad.any()) for n, p in wrapper.module.named_parameters()}
    assert grads == {n: n != "second.bias" for n in grads}
