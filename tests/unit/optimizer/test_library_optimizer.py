"""Wrapper and optimizer as projects use them: without groups, in parts, chained, offloaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import CheckpointError, ConfigError
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.pipeline_parallel import get_forward_backward_func
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch

NUMBERS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.5}
SHARDED = {"use_distributed_optimizer": True}


def wrapped(model: nn.Module, **ddp: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
    return DistributedDataParallel(ModelConfig(), config, model)


def backward(
    ddp: DistributedDataParallel, optimizer: MegatronOptimizer, seed: int, factor: float = 1.0
) -> None:
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    optimizer.scale_loss(mean_loss(ddp, token_batch(4, seed)) * factor).backward()
    finalize_model_grads([ddp])


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    params = [p for model in models for p in model.parameters()]
    matrices = {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}
    vectors = {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, vectors], lr=0.01)


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for name, param in model.state_dict().items():
        torch.testing.assert_close(param, expected.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharded", [{}, SHARDED], ids=["plain", "ZeRO"])
def test_a_loop_without_groups_is_adamw_with_clipping(sharded: dict):
    model = TinyModel()
    expected = copy.deepcopy(model)
    reference = adamw(expected)
    ddp = wrapped(model, **sharded)
    config = OptimizerConfig(loss_scale=8.0, log_num_zeros_in_grad=True, **NUMBERS, **sharded)
    optimizer = get_megatron_optimizer(config, [ddp], None, None, 1.0, False, False, None, None)
    for seed in range(3):
        backward(ddp, optimizer, seed)
        _, norm, zeros = optimizer.step()
        reference.zero_grad()
        mean_loss(expected, token_batch(4, seed)).backward()
        grads = [p.grad for p in expected.parameters() if p.grad is not None]
        assert zeros == sum(int((g == 0).sum()) for g in grads)
        total = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        assert norm == pytest.approx(float(total), rel=1e-5)
        reference.step()
    assert_same(model, expected)
    assert sum(p.numel() for p in optimizer.get_parameters()) == sum(
        p.numel() for p in model.parameters()
    )


@pytest.mark.parametrize("sharded", [{}, SHARDED], ids=["plain", "ZeRO"])
def test_chained_optimizers_clip_by_one_norm_and_skip_together(sharded: dict):
    models = [TinyModel(seed=1), TinyModel(seed=2)]
    expected = copy.deepcopy(models)
    reference = adamw(*expected)
    ddps = [wrapped(model, **sharded) for model in models]
    config = OptimizerConfig(**NUMBERS, **sharded)
    parts = [get_megatron_optimizer(config, [ddp]) for ddp in ddps]
    chain = ChainedOptimizer(parts)
    for seed in range(2):
        reference.zero_grad()
        for ddp, part, twin in zip(ddps, parts, expected, strict=True):
            backward(ddp, part, seed)
            mean_loss(twin, token_batch(4, seed)).backward()
        total = nn.utils.clip_grad_norm_([p for m in expected for p in m.parameters()], 0.5)
        assert chain.step()[1] == pytest.approx(float(total), rel=1e-5)
        reference.step()
    for model, twin in zip(models, expected, strict=True):
        assert_same(model, twin)

    # A saved state continues; an infinite gradient of one model skips the step of both.
    others = [wrapped(copy.deepcopy(model), **sharded) for model in models]
    second = ChainedOptimizer([get_megatron_optimizer(config, [ddp]) for ddp in others])
    second.load_state_dict(dict(enumerate(chain.state_dict())))
    assert {key[0] for key in second.state} == {0, 1}
    params = sum(len(part.get_parameters()) for part in parts)
    assert len(second.state) == len(dict(second.state.items())) == params
    with pytest.raises(CheckpointError, match="1 optimizers"):
        second.load_state_dict(chain.state_dict()[:1])
    for run, optimizer in ((ddps, chain), (others, second)):
        for factor, updates in ((float("inf"), False), (1.0, True)):
            for ddp, part in zip(run, optimizer.chained_optimizers, strict=True):
                backward(ddp, part, 7, factor if ddp is run[0] else 1.0)
            assert optimizer.step()[0] is updates
    for model, other in zip(models, others, strict=True):
        assert_same(other.module, model)
    assert isinstance(chain, MegatronOptimizer)
    assert len(chain.param_groups) == 4
    with pytest.raises(AssertionError, match="chained_optimizers"):
        _ = chain.optimizer
    assert ChainedOptimizer(parts[:1]).optimizer is parts[0].optimizer
    assert ChainedOptimizer([]).is_stub_optimizer


def test_a_gradient_without_a_buffer_has_megatron_cores_name_until_the_next_step():
    ddp = wrapped(TinyModel())
    optimizer = get_megatron_optimizer(OptimizerConfig(**NUMBERS), [ddp])
    backward(ddp, optimizer, 1)
    assert all(param.main_grad is param.grad for param in ddp.parameters())
    ddp.zero_grad_buffer()
    assert not any(hasattr(param, "main_grad") for param in ddp.parameters())


@pytest.mark.parametrize("returned", [torch.ones(()), (1, 2, 3, 4), None])
def test_a_step_says_what_a_loss_function_has_to_return(returned: Any):
    def step(data: Any, model: nn.Module) -> Any:
        return model(token_batch(2)), lambda output: returned

    sizes = {"seq_length": 4, "micro_batch_size": 2}
    step_args = {"forward_step_func": step, "data_iterator": None, "model": TinyModel(), **sizes}
    with pytest.raises(ConfigError, match=r"return \(loss, reported\)"):
        get_forward_backward_func()(**step_args, num_microbatches=1)
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        get_forward_backward_func()(**step_args, num_microbatches=0)


def test_a_number_of_tokens_may_be_an_integer():
    def step(data: Any, model: nn.Module) -> Any:
        return model(token_batch(2)), lambda output: (output.sum(), 8, {})

    model = TinyModel()
    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=None,
        model=model,
        num_microbatches=2,
        seq_length=4,
        micro_batch_size=2,
    )
    assert len(losses) == 2
    expected = copy.deepcopy(model)
    expected.zero_grad()
    (expected(token_batch(2)).sum() / 8).backward()
    torch.testing.assert_close(model.first.weight.grad, expected.first.weight.grad)


def _offload(ddp: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
    """Free and restore what projects move to the host between training and generation."""
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        copied = buffer.param_data.clone()
        sizes = [t.untyped_storage().size() for t in (buffer.param_data, buffer.grad_data)]
        buffer.param_data.untyped_storage().resize_(0)
        buffer.grad_data.untyped_storage().resize_(0)
        buffer.param_data.untyped_storage().resize_(sizes[0])
        buffer.param_data.copy_(copied)
        buffer.grad_data.untyped_storage().resize_(sizes[1])
        buffer.grad_data.zero_()
    for group in optimizer.shard_fp32_from_float16_groups:
        for param in group:
            param.data = param.data.to("cpu").clone()
    for state in optimizer.optimizer.state.values():
        for key, value in state.items():
            value = value.to("cpu", non_blocking=True)
            state[key] = value.clone() if isinstance(value, Tensor) else value
    optimizer.optimizer._move_new_state_to_right_device()


@pytest.mark.parametrize(
    ("dtype", "moments"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_offloading_by_walking_buffers_and_state_changes_nothing(
    dtype: torch.dtype, moments: torch.dtype
):
    runs = []
    for _ in range(2):
        ddp = wrapped(TinyModel(dtype=dtype), **SHARDED)
        config = OptimizerConfig(**NUMBERS, **SHARDED)
        config.use_precision_aware_optimizer = moments != torch.float32
        config.exp_avg_dtype = config.exp_avg_sq_dtype = moments
        runs.append((ddp, get_megatron_optimizer(config, [ddp])))
    for seed in range(3):
        results = []
        for ddp, optimizer in runs:
            backward(ddp, optimizer, seed)
            results.append(optimizer.step())
        assert results[0] == results[1]
        _offload(*runs[1])
    for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        assert torch.equal(a, b)


def main_values(optimizer: MegatronOptimizer) -> Tensor:
    """All fp32 main parameters, sorted."""
    mains = [state["fp32_param"] for _, _, state in optimizer.named_state()]
    values = [m.read() if isinstance(m, StateStorage) else m for m in mains]
    return torch.cat([value.flatten() for value in values]).sort().values


def test_main_parameters_take_wider_weights_of_a_state_dict():
    wide = TinyModel(seed=5).state_dict()
    for sharded in ({}, SHARDED):
        model = TinyModel(dtype=torch.bfloat16)
        ddp = wrapped(model, **sharded)
        optimizer = get_megatron_optimizer(OptimizerConfig(**NUMBERS, **sharded), [ddp])
        model.load_state_dict(wide)
        optimizer.reload_model_params()
        expected = torch.cat([value.flatten() for value in wide.values()]).sort().values
        assert torch.equal(main_values(optimizer), expected.bfloat16().float())
        optimizer.reload_model_params(state_dict={"model": wide})
        assert torch.equal(main_values(optimizer), expected)


def test_modules_end_the_batch_once_after_their_gradients():
    class Counting(TinyModel):
        ended: list[int] = []

        @staticmethod
        def end_batch(model: list[nn.Module], groups: ProcessGroupCollection) -> None:
            Counting.ended.append(len(model))

    finalize_model_grads([wrapped(Counting()), wrapped(Counting())])
    assert Counting.ended == [2]


def _groups(optimizer: MegatronOptimizer) -> set[tuple[float, float | None, int]]:
    return {
        (g["wd_mult"], g.get("max_lr"), sum(p.numel() for p in g["params"]))
        for g in optimizer.param_groups
    }


def test_overrides_select_parameters_by_name_attribute_or_predicate():
    model = TinyModel()
    config = OptimizerConfig(**NUMBERS)
    standard = get_megatron_optimizer(config, [model])
    overrides = get_standard_config_overrides(config)
    assert _groups(get_megatron_optimizer(config, [model], config_overrides=overrides)) == _groups(
        standard
    )
    model.first.weight.is_special = True
    overrides = {
        ParamKey(name="*.bias"): ParamGroupOverride(wd_mult=0.0),
        ParamKey(attr=("is_special",)): {"max_lr": 0.5},
    }
    muon = get_megatron_muon_optimizer(config, [model], config_overrides=overrides)
    assert _groups(muon) == {
        (0.0, None, 16 + 16 + 8),
        (1.0, None, 13 * 8 + 16 + 16 * 8),
        (1.0, 0.5, 16 * 8),
    }


def test_configurations_can_be_derived_and_assigned():
    @dataclass
    class Derived(OptimizerConfig):
        def __post_init__(self) -> None:
            """Check later, as projects do."""

        def finalize(self) -> None:
            super().__post_init__()

    with pytest.raises(ConfigError, match="give the peak learning rate"):
        get_megatron_optimizer(OptimizerConfig(), [TinyModel()])
    config = Derived(optimizer="sdg", min_lr=None, lr=0.1)
    with pytest.raises(ConfigError, match="sdg"):
        config.finalize()
    config.optimizer = "sgd"
    config.finalize()
    model = TinyModel()
    before: Tensor = model.first.weight.detach().clone()
    optimizer = get_megatron_optimizer(config, [model])
    optimizer.param_groups[0]["lr"] = 0.1
    mean_loss(model, token_batch(4)).backward()
    optimizer.step()
    assert not torch.equal(before, model.first.weight)
    with pytest.raises(ValueError, match="use_megatron_fsdp"):
        DistributedDataParallelConfig(use_custom_fsdp=True)
