"""The update against torch.optim, in fp32 and with main parameters."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.errors import CheckpointError, NonFiniteError
from megatron.core.diagnostics.timers import Timers
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.param_groups import make_param_groups, no_weight_decay_on_embeddings
from megatron.core.optimizer.reduced_precision_state import StateStorage
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, set_info
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch

NUMBERS = {"lr": 0.01, "weight_decay": 0.1, "adam_beta2": 0.95}


class Run:
    """A model, its wrapper and its optimizer."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        model: nn.Module | None = None,
        dtype: torch.dtype = torch.float32,
        check: bool = False,
        **numbers: Any,
    ) -> None:
        self.model = TinyModel(dtype=dtype) if model is None else model
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, check_for_nan_in_grad=check
        )
        self.ddp = DistributedDataParallel(
            ModelConfig(), ddp_config, self.model, pg_collection=groups
        )
        config = OptimizerConfig(**{**NUMBERS, **numbers})
        self.optimizer = get_megatron_optimizer(config, [self.ddp], pg_collection=groups)

    def step(self, seed: int = 0, factor: float = 1.0) -> tuple[bool, float | None, int | None]:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = mean_loss(self.ddp, token_batch(4, seed)) * factor
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([self.ddp])
        return self.optimizer.step()


def decaying_groups(model: nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def torch_adam(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_moves_the_version_of_every_weight(
    alone: ProcessGroupCollection, dtype: torch.dtype
):
    """Layers that keep a quantized copy go by it; a fused update in place leaves it."""
    run = Run(alone, dtype=dtype)
    versions = [param._version for param in run.model.parameters()]
    run.step()
    now = [param._version for param in run.model.parameters()]
    assert all(a > b for a, b in zip(now, versions, strict=True))


@pytest.mark.feature("Training: AdamW with the bits of torch.optim, SGD, clipping by global norm")
def test_adam_is_torchs_adamw_to_the_bit(alone: ProcessGroupCollection):
    run, plain = Run(alone, clip_grad=0.0), TinyModel()
    adam = torch_adam(decaying_groups(plain))
    for seed in range(20):
        done, norm, _ = run.step(seed)
        adam.zero_grad()
        mean_loss(plain, token_batch(4, seed)).backward()
        assert done
        assert norm == pytest.approx(
            float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])), rel=1e-6
        )
        adam.step()
    torch.testing.assert_close(run.model.state_dict(), plain.state_dict(), **tolerances.BITWISE)


def test_sgd_is_torchs_sgd_to_the_bit(alone: ProcessGroupCollection):
    run, plain = Run(alone, optimizer="sgd", clip_grad=0.0), TinyModel()
    sgd = torch.optim.SGD(decaying_groups(plain), lr=0.01, momentum=0.9, fused=True)
    for seed in range(20):
        run.step(seed)
        sgd.zero_grad()
        mean_loss(plain, token_batch(4, seed)).backward()
        sgd.step()
    torch.testing.assert_close(run.model.state_dict(), plain.state_dict(), **tolerances.BITWISE)


def test_clipping_is_torchs_clipping(alone: ProcessGroupCollection):
    run, plain = Run(alone, clip_grad=0.05), TinyModel()
    adam = torch_adam(decaying_groups(plain))
    for seed in range(20):
        _, norm, _ = run.step(seed)
        adam.zero_grad()
        mean_loss(plain, token_batch(4, seed)).backward()
        assert norm == pytest.approx(
            float(nn.utils.clip_grad_norm_(plain.parameters(), 0.05)), rel=1e-5
        )
        adam.step()
    torch.testing.assert_close(
        run.model.state_dict(), plain.state_dict(), **tolerances.of(torch.float32)
    )


@pytest.mark.feature(
    "Training: fp32, bf16 and fp16 with fp32 main parameters, constant and dynamic loss scale"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_models_are_updated_through_32_bit_main_parameters(
    alone: ProcessGroupCollection, dtype: torch.dtype
):
    run = Run(alone, dtype=dtype, clip_grad=0.0, initial_loss_scale=2.0**10)
    plain = TinyModel(dtype=dtype)
    mains = [p.detach().float().requires_grad_() for p in plain.parameters()]
    adam = torch.optim.AdamW(
        [
            {"params": [m for m in mains if m.dim() > 1], "weight_decay": 0.1},
            {"params": [m for m in mains if m.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=True,
    )
    scale = float(run.optimizer.get_loss_scale())
    assert scale == (2.0**10 if dtype is torch.float16 else 1.0)
    for seed in range(10):
        run.step(seed)
        plain.zero_grad()
        (mean_loss(plain, token_batch(4, seed)) * scale).backward()
        for p, main in zip(plain.parameters(), mains, strict=True):
            main.grad = p.grad.float() / scale
        adam.step()
        with torch.no_grad():
            for p, main in zip(plain.parameters(), mains, strict=True):
                p.copy_(main)
    torch.testing.assert_close(run.model.state_dict(), plain.state_dict(), **tolerances.BITWISE)


def test_a_constant_loss_scale_changes_nothing_but_the_range(alone: ProcessGroupCollection):
    scaled, plain = Run(alone, loss_scale=1024.0), Run(alone)
    for seed in range(5):
        results = scaled.step(seed), plain.step(seed)
        assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    torch.testing.assert_close(
        scaled.model.state_dict(), plain.model.state_dict(), **tolerances.of(torch.float32)
    )


def test_overflow_skips_the_step_and_lowers_the_scale(alone: ProcessGroupCollection):
    run = Run(alone, dtype=torch.float16, initial_loss_scale=2.0**6, hysteresis=2)
    run.step()
    before = copy.deepcopy(run.model.state_dict())
    for scale in (2.0**6, 2.0**5, 2.0**4):
        assert run.step(factor=float("inf")) == (False, None, None)
        assert float(run.optimizer.get_loss_scale()) == scale
    torch.testing.assert_close(run.model.state_dict(), before, **tolerances.BITWISE)
    assert run.step()[0]


def test_a_nan_without_a_loss_scale_stops_the_run_and_names_the_parameter(
    alone: ProcessGroupCollection,
):
    run = Run(alone, check=True)
    run.model.second.weight.register_hook(lambda grad: grad * float("nan"))
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(NonFiniteError, match="rank 0 has a NaN or infinite gradient in second"):
        run.step()
    torch.testing.assert_close(run.model.state_dict(), before, **tolerances.BITWISE)


def test_a_nan_that_is_not_checked_for_skips_the_step(alone: ProcessGroupCollection):
    run = Run(alone)
    before = copy.deepcopy(run.model.state_dict())
    assert run.step(factor=float("nan")) == (False, None, None)
    torch.testing.assert_close(run.model.state_dict(), before, **tolerances.BITWISE)
    assert run.step()[0]


def test_zeros_are_counted_exactly_and_without_padding(alone: ProcessGroupCollection):
    model = TinyModel()
    # Rows 11 and 12 of the vocabulary are padding.
    set_info(model.embedding.weight, ParamInfo(global_shape=(11, 8), shard_dim=0))
    run = Run(alone, model=model, log_num_zeros_in_grad=True)
    model.embedding.weight.register_hook(lambda grad: grad * 0)
    model.first.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), 0.0))
    _, _, num_zeros = run.step()
    assert num_zeros == 11 * 8 + 8


def test_zeros_are_not_counted_unless_asked_for(alone: ProcessGroupCollection):
    assert Run(alone).step()[2] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_padding_rows_stay_exactly_zero(
    alone: ProcessGroupCollection, dtype: torch.dtype, rule: str
):
    model = TinyModel(dtype=dtype)
    with torch.no_grad():
        model.embedding.weight[11:] = 0
    model.embedding.weight.register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([11, 12]), 0.0)
    )
    run = Run(alone, model=model, optimizer=rule)
    for seed in range(10):
        run.step(seed)
    assert (model.embedding.weight[11:] == 0).all()
    assert (model.embedding.weight[:11] != 0).all()


def test_a_parameter_that_was_not_used_decays_like_every_other(alone: ProcessGroupCollection):
    model = TinyModel()
    model.unused = nn.Parameter(torch.ones(2, 2))
    run = Run(alone, model=model)
    run.step()
    assert model.unused.tolist() == [[pytest.approx(1 - 0.01 * 0.1)] * 2] * 2


def test_frozen_parameters_are_left_alone(alone: ProcessGroupCollection):
    model = TinyModel(dtype=torch.bfloat16)
    model.first.weight.requires_grad_(False)
    before = model.first.weight.clone()
    run = Run(alone, model=model)
    run.step()
    assert torch.equal(model.first.weight, before)
    assert "first.weight" not in {name for name, _, _ in run.optimizer.named_state()}


def test_a_rank_without_trainable_parameters_can_step(alone: ProcessGroupCollection):
    model = TinyModel().requires_grad_(False)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0), [model], pg_collection=alone)
    assert optimizer.step() == (True, 0.0, None)


# -- groups -----------------------------------------------------------------------------------


def make_optimizer(groups: ProcessGroupCollection, **more: Any) -> MegatronOptimizer:
    conditions = {
        key: more.pop(key)
        for key in ("no_weight_decay_cond", "scale_lr_cond", "lr_mult")
        if key in more
    }
    model = TinyModel()
    info = ParamInfo(global_shape=(13, 8), is_embedding_or_output=True)
    set_info(model.embedding.weight, info)
    config = OptimizerConfig(**{**NUMBERS, **more})
    return get_megatron_optimizer(config, [model], pg_collection=groups, **conditions)


def settings(optimizer: MegatronOptimizer, *keys: str) -> dict[str, tuple]:
    """Per parameter name the values of its group."""
    names = {id(p.main): p.name for p in optimizer.params}
    return {
        names[id(p)]: tuple(group.get(key) for key in keys)
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_biases_and_norms_do_not_decay(alone: ProcessGroupCollection):
    decays = settings(make_optimizer(alone), "wd_mult", "weight_decay")
    free = {name for name, values in decays.items() if values == (0.0, 0.0)}
    assert free == {"first.bias", "second.bias", "norm.weight", "norm.bias"}
    assert decays["first.weight"] == (1.0, 0.1)


def test_norms_of_queries_and_keys_can_decay() -> None:
    layer = torch.nn.ModuleDict(
        {name: torch.nn.LayerNorm(4) for name in ("q_layernorm", "k_layernorm", "input_layernorm")}
    )
    config = OptimizerConfig(lr=1.0, weight_decay=0.1, apply_wd_to_qk_layernorm=True)
    groups = make_param_groups([torch.nn.ModuleDict({"attention": layer})], config)
    decaying = [group["params"] for group in groups if group["weight_decay"] == 0.1]
    assert decaying == [[layer["q_layernorm"].weight, layer["k_layernorm"].weight]]


def test_embeddings_can_be_kept_from_decaying(alone: ProcessGroupCollection):
    optimizer = make_optimizer(alone, no_weight_decay_cond=no_weight_decay_on_embeddings)
    decays = settings(optimizer, "wd_mult")
    assert decays["embedding.weight"] == decays["first.bias"] == (0.0,)
    assert decays["first.weight"] == (1.0,)


def test_some_parameters_may_learn_at_a_multiple(alone: ProcessGroupCollection):
    optimizer = make_optimizer(
        alone, scale_lr_cond=lambda name, param: name.startswith("second"), lr_mult=10.0
    )
    rates = settings(optimizer, "lr_mult", "lr")
    assert rates["second.weight"] == (10.0, 0.1)
    assert rates["first.weight"] == (1.0, 0.01)


def test_a_decoupled_rate_is_that_of_embeddings_and_output(alone: ProcessGroupCollection):
    keys = ("is_decoupled_lr", "lr", "max_lr", "min_lr")
    rates = settings(make_optimizer(alone, decoupled_lr=0.5, min_lr=0.001), *keys)
    assert rates["embedding.weight"] == (True, 0.5, 0.5, 0.001)
    assert rates["first.weight"] == (False, 0.01, None, None)
    rates = settings(make_optimizer(alone, decoupled_lr=0.5, decoupled_min_lr=0.2), *keys)
    assert rates["embedding.weight"] == (True, 0.5, 0.5, 0.2)


# -- state ------------------------------------------------------------------------------------


def read(state: dict[str, Tensor | StateStorage]) -> dict[str, Tensor]:
    return {key: s.read() if isinstance(s, StateStorage) else s.clone() for key, s in state.items()}


def tensors(run: Run) -> dict[str, dict[str, Tensor]]:
    return {name: read(state) for name, _, state in run.optimizer.named_state()}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"optimizer": "sgd"}, {"dtype": torch.float16}],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    alone: ProcessGroupCollection, options: dict, by_name: bool
):
    whole, first = Run(alone, **options), Run(alone, **options)
    second = Run(alone, model=TinyModel(seed=9, dtype=first.model.norm.weight.dtype), **options)
    for seed in range(8):
        whole.step(seed)
    for seed in range(4):
        first.step(seed)
    second.model.load_state_dict(first.model.state_dict())
    if by_name:
        saved = tensors(first)
        for name, _, state in second.optimizer.named_state():
            for key, kept in state.items():
                write = kept.write if isinstance(kept, StateStorage) else kept.copy_
                write(saved[name][key])
        second.optimizer.load_scalar_state(json.loads(json.dumps(first.optimizer.scalar_state())))
    else:
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for seed in range(4, 8):
        second.step(seed)
    torch.testing.assert_close(
        second.model.state_dict(), whole.model.state_dict(), **tolerances.BITWISE
    )
    torch.testing.assert_close(tensors(second), tensors(whole), **tolerances.BITWISE)
    assert second.optimizer.scalar_state() == whole.optimizer.scalar_state()


def test_named_state_is_live_and_complete_before_the_first_step(alone: ProcessGroupCollection):
    run = Run(alone, dtype=torch.bfloat16)
    state = {name: values for name, _, values in run.optimizer.named_state()}
    assert set(state) == {name for name, _ in run.model.named_parameters()}
    assert set(state["first.weight"]) == {"fp32_param", "exp_avg", "exp_avg_sq"}
    assert not state["first.weight"]["exp_avg"].any()
    run.step()
    assert run.optimizer.scalar_state()["step"] == 1.0
    assert state["first.weight"]["exp_avg"].any()
    main = read(state["first.weight"])["fp32_param"]
    assert torch.equal(main.bfloat16(), run.model.first.weight)


def test_an_fp32_model_has_no_masters(alone: ProcessGroupCollection):
    for _, _, state in Run(alone).optimizer.named_state():
        assert set(state) == {"exp_avg", "exp_avg_sq"}


def test_masters_can_start_from_the_models_parameters(alone: ProcessGroupCollection):
    run = Run(alone, dtype=torch.bfloat16)
    run.model.load_state_dict(TinyModel(seed=9, dtype=torch.bfloat16).state_dict())
    run.optimizer.reload_model_params()
    for name, _, state in run.optimizer.named_state():
        assert torch.equal(read(state)["fp32_param"], run.model.get_parameter(name).float())


def test_a_state_of_other_groups_is_refused(alone: ProcessGroupCollection):
    run, other = Run(alone), make_optimizer(alone, decoupled_lr=0.5)
    with pytest.raises(CheckpointError, match=r"groups have \[\d.* this run's \[\d"):
        other.load_state_dict(run.optimizer.state_dict())


def test_a_state_without_a_needed_tensor_is_refused(alone: ProcessGroupCollection):
    run = Run(alone)
    run.step()
    saved = run.optimizer.state_dict()
    del saved["optimizer"]["state"][0]["exp_avg"]
    with pytest.raises(CheckpointError, match="no entry 'exp_avg'"):
        Run(alone).optimizer.load_state_dict(saved)


def test_sgd_without_momentum_keeps_no_state(alone: ProcessGroupCollection):
    run, plain = Run(alone, optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0), TinyModel()
    sgd = torch.optim.SGD(decaying_groups(plain), lr=0.01, fused=True)
    run.step()
    mean_loss(plain, token_batch(4, 0)).backward()
    sgd.step()
    torch.testing.assert_close(run.model.state_dict(), plain.state_dict(), **tolerances.BITWISE)
    assert all(not state for _, _, state in run.optimizer.named_state())


def test_loading_keeps_the_numbers_of_the_command_line(alone: ProcessGroupCollection):
    run, other = Run(alone), Run(alone, adam_beta1=0.5)
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    assert other.optimizer.param_groups[0]["betas"] == (0.5, 0.95)


def test_a_step_is_timed_in_its_parts(alone: ProcessGroupCollection):
    run = Run(alone, log_num_zeros_in_grad=True)
    run.optimizer.timers = Timers(1, "max")
    run.step()
    assert set(run.optimizer.timers.times_s()) == {
        "optimizer-copy-to-main-grad",
        "optimizer-clip-main-grad",
        "optimizer-count-zeros",
        "optimizer-inner-step",
        "optimizer-copy-main-to-model-params",
    }


def test_a_gradient_norm_is_as_exact_as_fp64(alone: ProcessGroupCollection):
    numbers = torch.randn(5_000_001, generator=torch.Generator().manual_seed(1)) * 1e-3
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros_like(numbers))
    model.weight.grad = numbers.clone()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.0), [model], pg_collection=alone)
    _, norm, _ = optimizer.step()
    assert norm == pytest.approx(math.sqrt(float(numbers.double().square().sum())), rel=1e-7)
