"""Weight gradients that wait in a queue are those of an ordinary backward pass, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.param_init import Init
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests import tolerances
from tests.unit.one_process import one_process_groups, one_rank, tiny_config


def small_gpt(*, tied: bool = False, **changes: Any) -> GPTModel:
    config = tiny_config(**changes)
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
    assert torch.equal(x.grad, layer.weight.sum(0).expand(2, 3, 6))
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
