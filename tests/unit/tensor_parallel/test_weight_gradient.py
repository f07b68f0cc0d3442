"""Weight gradients that wait in a queue are those of an ordinary backward pass, bit for bit.

So are those that go straight to the main gradient, whenever they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.params.param_init import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue, adds_to_main_grad
from tests.support import tolerances
from tests.support.one_process import one_process_groups, one_rank, tiny_config


def small_gpt(*, tied: bool = False, **changes: Any) -> GPTModel:
    config = tiny_config(**{"gradient_accumulation_fusion": True, **changes})
    torch.manual_seed(1)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(config=config),
        104,
        16,
        pg_collection=one_process_groups(),
        share_embeddings_and_output_weights=tied,
        unpadded_vocab_size=101,
    )


def loss_of(model: GPTModel, seed: int) -> Tensor:
    ids = torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(16).expand(2, 16)
    return model(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()


def gradients_of_two(model: GPTModel, queue: WeightGradQueue | None = None) -> dict[str, Tensor]:
    """Gradients of two micro-batches, the matrices' computed after both where there is a queue."""
    model.zero_grad()
    for seed in (3, 4):
        loss = loss_of(model, seed)
        if queue is None:
            loss.backward()
            continue
        with queue.collecting():
            loss.backward()
    if queue is not None:
        matrices = [
            m.weight for m in model.modules() if isinstance(m, _LINEAR) if m.weight is not None
        ]
        assert matrices
        assert all(weight.grad is None for weight in matrices)
        assert len(queue) >= 2 * len(matrices)
        queue.run()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


_LINEAR = (ColumnParallelLinear, RowParallelLinear)
LLAMA = {"gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**LLAMA, "params_dtype": torch.bfloat16},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    ],
    ids=["plain", "llama_bf16", "full_recompute", "selective_recompute"],
)
def test_deferred_gradients_are_the_same_bits(changes: dict[str, Any]) -> None:
    expected = gradients_of_two(small_gpt(**changes))
    deferred = gradients_of_two(small_gpt(**changes), WeightGradQueue())
    assert expected.keys() == deferred.keys()
    for name, grad in expected.items():
        assert torch.equal(deferred[name], grad), name


def test_the_output_layer_alone_may_wait() -> None:
    queue, model = WeightGradQueue(), small_gpt()
    for seed in (3, 4):
        with queue.collecting(only_output_layer=True):
            loss_of(model, seed).backward()
    assert len(queue) == 2
    missing = {name for name, p in model.named_parameters() if p.grad is None}
    assert missing == {"output_layer.weight"}
    queue.run(1)
    assert len(queue) == 1
    queue.run()
    assert torch.equal(
        model.output_layer.weight.grad, gradients_of_two(small_gpt())["output_layer.weight"]
    )


def test_a_weight_with_two_uses_does_not_wait() -> None:
    expected = gradients_of_two(small_gpt(tied=True))
    model, queue = small_gpt(tied=True), WeightGradQueue()
    name = "embedding.word_embeddings.weight"
    with queue.collecting():
        loss_of(model, 3).backward()
        loss_of(model, 4).backward()
    assert torch.equal(dict(model.named_parameters())[name].grad, expected[name])


@pytest.mark.parametrize("tied", [False, True])
def test_a_bucket_waits_for_gradients_in_the_queue(tied: bool) -> None:
    changes: Any = {"params_dtype": torch.bfloat16, "tied": tied}
    expected = {n: g.float() for n, g in gradients_of_two(small_gpt(**changes)).items()}
    model, queue = small_gpt(**changes), WeightGradQueue()
    wrapper = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True),
        model,
        pg_collection=one_process_groups(),
    )
    wrapper.zero_grad_buffer()
    with queue.collecting():
        with wrapper.no_sync():
            loss_of(model, 3).backward()
        loss_of(model, 4).backward()
    assert not any(bucket.is_started for bucket in wrapper.buckets)
    with wrapper.no_sync():
        queue.run(len(queue) // 2)
    queue.run(len(queue) - 1)
    assert not any(bucket.is_started for bucket in wrapper.buckets)
    queue.run(1)
    assert all(bucket.is_started for bucket in wrapper.buckets)
    wrapper.finish_grad_sync()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.main_grad, expected[name], **tolerances.of(torch.bfloat16))


@pytest.fixture
def two_replicas() -> Iterator[ProcessGroupCollection]:
    """The groups of the first of two data-parallel ranks; collectives change nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield create_process_groups(*make_grids(2))
    dist.destroy_process_group()


def main_gradients(
    groups: ProcessGroupCollection, *, later: bool = False, **changes: Any
) -> tuple[dict[str, Tensor], set[str]]:
    """Gradients of the third of three steps, and whose numbers no product overwrites."""
    model, queue = small_gpt(**changes), WeightGradQueue() if later else None
    wrapper = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(), model, pg_collection=groups
    )
    for _ in range(3):
        wrapper.zero_grad_buffer()
        closed = {n for n, p in model.named_parameters() if not adds_to_main_grad(p)}
        for buffer in wrapper.grad_buffers.values():  # the last step's numbers count for nothing
            if wrapper.buckets[0].slots[0].is_stale:
                buffer.grad_data.fill_(float("nan"))
        for seed in (3, 4):
            with nullcontext() if queue is None else queue.collecting():
                loss_of(model, seed).backward()
        if queue is not None:
            queue.run()
        wrapper.finish_grad_sync()
    assert all(p.grad is None for p in model.parameters())
    return {n: p.main_grad.clone() for n, p in model.named_parameters()}, closed


@pytest.mark.feature("Optimizer: weight gradients added to the fp32 main gradient by their product")
@pytest.mark.parametrize("tied", [False, True])
def test_products_add_to_the_main_gradient(
    two_replicas: ProcessGroupCollection, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, closed = main_gradients(two_replicas, tied=tied, gradient_accumulation_fusion=False)
    assert closed == plain.keys()
    products = []
    addmm = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *a, **k: products.append(k["beta"]) or addmm(*a, **k)
    )
    fused, _ = main_gradients(two_replicas, tied=tied)
    num_matrices = 4 * 2 + (not tied)
    assert products == 3 * [*num_matrices * [0], *num_matrices * [1]]
    later, _ = main_gradients(two_replicas, tied=tied, later=True)
    for name, grad in plain.items():
        torch.testing.assert_close(fused[name], grad, **tolerances.of(torch.float32))
        assert torch.equal(later[name], fused[name]), name


def test_sums_in_32_bits_take_no_16_bit_products_on_a_cpu(
    two_replicas: ProcessGroupCollection,
) -> None:
    model = small_gpt(params_dtype=torch.bfloat16)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    DistributedDataParallel(model.config, ddp_config, model, pg_collection=two_replicas)
    assert not any(adds_to_main_grad(p) for p in model.parameters())


def test_a_matrix_that_two_layers_share_is_left_to_autograd(
    two_replicas: ProcessGroupCollection,
) -> None:
    layers = [linear(bias=False) for _ in range(3)]
    layers[1].weight = layers[0].weight
    model = torch.nn.ModuleList(layers)
    ddp_config = DistributedDataParallelConfig()
    config = tiny_config(gradient_accumulation_fusion=True)
    DistributedDataParallel(config, ddp_config, model, pg_collection=two_replicas)
    assert [adds_to_main_grad(layer.weight) for layer in layers] == [False, False, True]


def linear(kind: type = ColumnParallelLinear, **more: Any) -> Any:
    layer = kind(
        6,
        4,
        config=tiny_config(),
        init_method=Init("normal", 0.1),
        tp_group=one_rank(),
        **more,
    )
    torch.manual_seed(0)
    for param in layer.parameters():
        torch.nn.init.normal_(param)
    return layer


def test_hooks_hear_of_a_gradient_when_it_is_computed() -> None:
    layer, queue, heard = linear(), WeightGradQueue(), []
    for name, param in layer.named_parameters():
        param.register_post_accumulate_grad_hook(
            # torch calls hooks for a gradient of None too
            lambda p, name=name: heard.append((name, p.grad)) if p.grad is not None else None
        )
    with queue.collecting():
        layer(torch.ones(2, 3, 6))[0].sum().backward()
    assert heard == []
    queue.run()
    assert [name for name, _ in heard] in (["weight", "bias"], ["bias", "weight"])
    assert torch.equal(dict(heard)["bias"], torch.full((4,), 6.0))
    assert torch.equal(dict(heard)["weight"], torch.full((4, 6), 6.0))


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_what_is_frozen_stays_without_gradient(kind: type, frozen: str) -> None:
    layer, queue = linear(kind), WeightGradQueue()
    for name, param in layer.named_parameters():
        param.requires_grad_(frozen not in (name, "both"))
    x = torch.ones(2, 3, 6, requires_grad=True)
    with queue.collecting():
        layer(x)[0].sum().backward()
    assert len(queue) == (frozen != "both")
    queue.run()
    expected = layer.weight.detach().sum(0).expand(2, 3, 6)
    torch.testing.assert_close(x.grad, expected, **tolerances.of(torch.float32))
    assert {n for n, p in layer.named_parameters() if p.grad is None} == {
        n for n in ("weight", "bias") if frozen in (n, "both")
    }


def test_a_weight_that_is_handed_in_does_not_wait() -> None:
    layer, queue = linear(skip_weight_param_allocation=True, bias=False), WeightGradQueue()
    origin = torch.ones(4, 6, requires_grad=True)
    with queue.collecting():
        layer(torch.ones(2, 3, 6), origin * 2)[0].sum().backward()
    assert len(queue) == 0
    assert torch.equal(origin.grad, torch.full((4, 6), 12.0))


def test_without_a_queue_layers_are_plain_torch() -> None:
    layer, x = linear(), torch.ones(2, 3, 6)
    plain = layer(x)[0].grad_fn.name()
    queue = WeightGradQueue()
    assert layer(x)[0].grad_fn.name() != plain
    del queue
    assert layer(x)[0].grad_fn.name() == plain
