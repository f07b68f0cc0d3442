"""Where the gradients of one rank go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.autograd import runs_hooks_without_gradient
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.grad_buffer import add_into, gradient_of
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import weight_gradient
from megatron.core.tensor_parallel.weight_gradient import add_to_main_grad
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch


def wrap(
    model: nn.Module, groups: ProcessGroupCollection, **options: Any
) -> DistributedDataParallel:
    ddp_config = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(ModelConfig(), ddp_config, model, pg_collection=groups)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: grad.clone()
        for name, p in model.named_parameters()
        if (grad := gradient_of(p)) is not None
    }


def test_one_replica_keeps_its_gradients_where_autograd_put_them(alone: ProcessGroupCollection):
    model, plain = TinyModel(), TinyModel()
    ddp = wrap(model, alone, grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    assert not ddp.grad_buffers
    for _ in range(2):
        mean_loss(ddp, token_batch(4)).backward()
        mean_loss(plain, token_batch(4)).backward()
    finalize_model_grads([ddp])
    torch.testing.assert_close(gradients(model), gradients(plain), **tolerances.BITWISE)
    ddp.zero_grad_buffer()
    assert all(p.grad is None for p in model.parameters())


def test_a_model_with_buffers_is_freed_after_its_last_use(alone: ProcessGroupCollection):
    model = TinyModel()
    ddp = wrap(model, alone, use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [ddp], pg_collection=alone
    )
    mean_loss(ddp, token_batch(4)).backward()
    ddp.finish_grad_sync()
    optimizer.step()
    freed = weakref.ref(model), weakref.ref(ddp.buffers[0])
    del model, ddp, optimizer
    gc.collect()
    assert [each() for each in freed] == [None, None]


def test_sixteen_bit_gradients_are_summed_in_32_bits(alone: ProcessGroupCollection):
    model, plain = TinyModel(dtype=torch.bfloat16), TinyModel(dtype=torch.bfloat16)
    ddp = wrap(model, alone, grad_reduce_in_fp32=True)
    expected = {name: torch.zeros(p.shape) for name, p in plain.named_parameters()}
    for step in range(2):
        ddp.zero_grad_buffer()
        for total in expected.values():
            total.zero_()
        for microbatch in range(3):
            mean_loss(ddp, token_batch(4, seed=10 * step + microbatch)).backward()
            plain.zero_grad()
            mean_loss(plain, token_batch(4, seed=10 * step + microbatch)).backward()
            for name, p in plain.named_parameters():
                expected[name] += p.grad.float()
        ddp.finish_grad_sync()
        torch.testing.assert_close(gradients(model), expected, **tolerances.BITWISE)
        assert all(p.grad is None for p in model.parameters())


def test_sixteen_bit_gradients_stay_so_without_the_flag(alone: ProcessGroupCollection):
    assert not wrap(TinyModel(dtype=torch.bfloat16), alone).grad_buffers


def test_a_parameter_without_a_gradient_counts_as_zero(alone: ProcessGroupCollection):
    model = TinyModel(dtype=torch.bfloat16)
    ddp = wrap(model, alone, grad_reduce_in_fp32=True)
    mean_loss(ddp, token_batch(4)).backward()
    ddp.finish_grad_sync()
    assert gradient_of(model.first.weight).abs().sum() > 0
    ddp.zero_grad_buffer()
    model.norm.weight.sum().backward()
    ddp.finish_grad_sync()
    assert gradient_of(model.first.weight).abs().sum() == 0
    assert gradient_of(model.norm.weight).tolist() == [1.0] * 16


class _AddsToMainGrad(torch.autograd.Function):
    """x W^T whose weight gradient goes straight to ``weight.main_grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(grad.t() @ x)
        ctx.weight.grad_added_to_main_grad = True
        return None, torch.full_like(ctx.weight, float("nan"))


class FusedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
        self.other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return _AddsToMainGrad.apply(x, self.weight) * self.other


@pytest.mark.parametrize("overlap", [False, True])
def test_a_layer_may_add_its_weight_gradient_itself(alone: ProcessGroupCollection, overlap: bool):
    model = FusedModel()
    ddp = wrap(model, alone, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    x = torch.ones(5, 2, dtype=torch.bfloat16)
    for _ in range(3):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            ddp(x).sum().backward()
        ddp(x).sum().backward()
        ddp.finish_grad_sync()
        assert gradient_of(model.weight).tolist() == [[10.0, 10.0]] * 3
        assert gradient_of(model.other).tolist() == [20.0] * 3
        assert model.weight.grad is None


class _AddsLikeOurLayers(_AddsToMainGrad):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        return None, add_to_main_grad(ctx.weight, grad.t() @ x)


@pytest.mark.feature("Memory: a gradient that a GEMM has added to its buffer takes no second place")
@pytest.mark.parametrize("runs_hooks", [False, True])
def test_our_layers_give_autograd_no_tensor_in_place_of_an_added_gradient(
    alone: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch, runs_hooks: bool
) -> None:
    """Unless torch runs no hook without one."""
    if not runs_hooks_without_gradient():
        pytest.skip("this torch needs a gradient to run a hook")
    monkeypatch.setattr(weight_gradient, "runs_hooks_without_gradient", lambda: runs_hooks)
    model = FusedModel()
    ddp = wrap(model, alone, grad_reduce_in_fp32=True, overlap_grad_reduce=True)
    model.weight.overwrite_main_grad = True
    x = torch.ones(5, 2, dtype=torch.bfloat16)
    for _ in range(2):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            _AddsLikeOurLayers.apply(x, model.weight).sum().backward()
        assert model.weight.grad is None
        (_AddsLikeOurLayers.apply(x, model.weight) * model.other).sum().backward()
        assert all(bucket.is_started for bucket in ddp.buckets)
        ddp.finish_grad_sync()
        assert gradient_of(model.weight).tolist() == [[10.0, 10.0]] * 3
    placeholder = weight_gradient.has_been_added(model.weight)
    assert (placeholder is None) == runs_hooks


def test_gradients_can_be_scaled_wherever_they_are(alone: ProcessGroupCollection):
    model = nn.ModuleDict(
        {"narrow": nn.Linear(2, 2, dtype=torch.bfloat16), "wide": nn.Linear(2, 2)}
    )
    ddp = wrap(model, alone, grad_reduce_in_fp32=True)
    for p in model.parameters():
        p.sum().backward()
    ddp.finish_grad_sync()
    ddp.scale_gradients(torch.tensor(0.25))
    assert all((grad == 0.25).all() for grad in gradients(model).values())


def test_the_wrapper_leaves_no_trace_in_a_state_dict(alone: ProcessGroupCollection):
    model, other = TinyModel(seed=1), TinyModel(seed=2)
    ddp = wrap(model, alone)
    assert list(ddp.state_dict()) == list(model.state_dict())
    wrap(other, alone).load_state_dict(ddp.state_dict())
    torch.testing.assert_close(other.state_dict(), model.state_dict(), **tolerances.BITWISE)


def test_a_frozen_parameter_gets_no_place(alone: ProcessGroupCollection):
    model = TinyModel(dtype=torch.bfloat16)
    model.embedding.weight.requires_grad_(False)
    ddp = wrap(model, alone, grad_reduce_in_fp32=True)
    mean_loss(ddp, token_batch(4)).backward()
    assert gradient_of(model.embedding.weight) is None


@pytest.mark.parametrize("numel", [1, 2**18, 2**18 + 1, 3 * 2**18 - 5])
def test_a_mixed_addition_in_pieces_is_the_addition(numel: int):
    total = torch.randn(numel)
    grad = torch.randn(numel).bfloat16()
    expected = total + grad
    add_into(total, grad)
    torch.testing.assert_close(total, expected, **tolerances.BITWISE)


def test_a_mixed_addition_takes_a_transposed_gradient():
    total, grad = torch.zeros(3, 4), torch.arange(12.0).view(4, 3).t().bfloat16()
    add_into(total, grad)
    assert total.tolist() == grad.float().tolist()
