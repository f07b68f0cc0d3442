"""State in fewer bits: what it costs, what it loses, and what comes back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.dist_checkpointing.records import from_param
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.reduced_precision_state import (
    QuantizedState,
    SplitMaster,
    StateStorage,
)
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch

AWARE = {"use_precision_aware_optimizer": True}
ALL_FORMATS = [
    AWARE,
    {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    {**AWARE, "exp_avg_dtype": "fp16", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"},
    {**AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    {**AWARE, "optimizer": "sgd"},
]


class Run:
    """A bf16 model with bf16 gradients and its optimizer."""

    def __init__(self, groups: ProcessGroupCollection, seed: int = 0, **numbers: Any) -> None:
        self.model = TinyModel(seed=seed, dtype=torch.bfloat16)
        self.ddp = DistributedDataParallel(
            ModelConfig(),
            DistributedDataParallelConfig(check_for_nan_in_grad=False),
            self.model,
            pg_collection=groups,
        )
        config = OptimizerConfig(**{"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.0, **numbers})
        self.optimizer = get_megatron_optimizer(config, [self.ddp], pg_collection=groups)

    def step(self, seed: int) -> float:
        self.ddp.zero_grad_buffer()
        loss = mean_loss(self.ddp, token_batch(4, seed))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        return {
            f"{kind} of {name}": (s.read() if isinstance(s, StateStorage) else s).clone()
            for name, _, state in self.optimizer.named_state()
            for kind, s in state.items()
        }


@pytest.mark.feature("Optimizer: main parameters as a bf16 weight and 16 bits, exact")
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_a_split_main_parameter_is_the_fp32_one_to_the_bit(
    alone: ProcessGroupCollection, rule: str
):
    plain, split = Run(alone, optimizer=rule), Run(alone, optimizer=rule, **AWARE)
    for seed in range(20):
        assert plain.step(seed) == split.step(seed)
    torch.testing.assert_close(split.state(), plain.state(), **tolerances.BITWISE)
    torch.testing.assert_close(
        split.model.state_dict(), plain.model.state_dict(), **tolerances.BITWISE
    )


def test_every_fp32_number_is_a_weight_and_a_remainder():
    bits = torch.arange(2**16, dtype=torch.int32).repeat(4)
    upper = torch.tensor([0x3F80, 0x3F81, -0x4080, -0x407F], dtype=torch.int32)
    numbers = (upper.repeat_interleave(2**16) * 2**16 + bits).view(torch.float32)
    split = SplitMaster(weight := torch.empty_like(numbers, dtype=torch.bfloat16))
    split.write(numbers)
    assert torch.equal(split.read(), numbers)
    is_tie = bits == 0x8000
    assert torch.equal(weight[~is_tie], numbers.bfloat16()[~is_tie])
    assert (weight[is_tie].abs() > numbers[is_tie].abs()).all()


@pytest.mark.parametrize(
    ("formats", "num_bytes"), [(ALL_FORMATS[0], 14), (ALL_FORMATS[1], 10)], ids=str
)
def test_bytes_of_a_parameter_with_its_gradient(
    alone: ProcessGroupCollection, formats: dict, num_bytes: int
):
    run = Run(alone, **formats)
    for _ in run.optimizer.named_state():
        pass
    matrix = run.model.first.weight
    matrix.grad = torch.zeros_like(matrix)
    (main,) = (p.main for p in run.optimizer.params if p.model is matrix)
    state = run.optimizer.rule.state_of(main)
    kept = [t for s in state.values() for t in (s.tensors if isinstance(s, StateStorage) else (s,))]
    tensors = {t.data_ptr(): t for t in (matrix, main, matrix.grad, *kept) if t.dim()}
    padded = -(-matrix.numel() // 128) * 128
    each = sum(t.element_size() * (t.numel() / len_of(t, padded, matrix)) for t in tensors.values())
    assert each == num_bytes


def chances(count: int, step: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32) * 7 + step * 0x2545F491


def len_of(tensor: Tensor, padded: int, matrix: Tensor) -> int:
    return padded if tensor.numel() == padded else matrix.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_what_was_kept_comes_back_to_the_bit(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(1000, generator=generator) * 10.0 ** -torch.arange(1000).div(100)
    for is_square in (False, True):
        first, second = (QuantizedState(numbers, dtype, is_square=is_square) for _ in range(2))
        first.put(0, numbers.abs() if is_square else numbers.clone(), chances(1000, 3))
        second.write(first.read())
        assert torch.equal(second.read(), first.read())
        error = (first.read().abs() / numbers.abs() - 1).abs().median()
        assert 0 < error < 2.0 ** -{2: 7, 1: 3}[dtype.itemsize]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_moment_shrinks_as_it_does_in_fp32(dtype: torch.dtype):
    """Rounding to nearest would leave it where it is, a third too large."""
    start = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) + 1.0
    kept = QuantizedState(start, dtype, is_square=True)
    kept.write(start)
    for step in range(300):
        values = kept.stretch(0, len(start)) * 0.999
        kept.put(0, values, chances(len(start), step))
    expected = float(start.mean()) * 0.999**300
    assert float(kept.read().mean()) == pytest.approx(expected, rel=0.04)


def test_small_numbers_of_a_second_moment_are_not_lost():
    numbers = torch.full((128,), 1e-12)
    numbers[0] = 1.0
    kept = QuantizedState(numbers, torch.float8_e4m3fn, is_square=True)
    kept.put(0, numbers.clone(), chances(128, 1))
    assert (kept.read() > 0).all()


@pytest.mark.feature(
    "Optimizer: moments and main parameters in bf16, fp16 and fp8, resumed bit for bit"
)
@pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)
def test_a_resumed_run_is_the_uninterrupted_one(alone: ProcessGroupCollection, formats: dict):
    whole, first, second = Run(alone, **formats), Run(alone, **formats), Run(alone, 9, **formats)
    third = Run(alone, 9, **formats)
    losses = [whole.step(seed) for seed in range(8)]
    for seed in range(4):
        first.step(seed)
    second.model.load_state_dict(first.model.state_dict())
    for (name, info, state), (_, _, saved) in zip(
        second.optimizer.named_state(), first.optimizer.named_state(), strict=True
    ):
        for kind in state:
            source = from_param(name, info, saved[kind])
            target = from_param(name, info, state[kind])
            assert source.dtype == torch.float32
            for piece, values in zip(target.pieces, source.pieces, strict=True):
                piece.fill(lambda data, values=values: data.copy_(values.data))
    second.optimizer.load_scalar_state(first.optimizer.scalar_state())
    third.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    if "main" not in first.optimizer.rule.state_of(first.optimizer.params[0].main):
        third.model.load_state_dict(first.model.state_dict())
    for run in (second, third):
        assert [run.step(seed) for seed in range(4, 8)] == losses[4:]
        torch.testing.assert_close(run.state(), whole.state(), **tolerances.BITWISE)


@pytest.mark.parametrize("formats", ALL_FORMATS, ids=str)
def test_fewer_bits_learn_as_well(alone: ProcessGroupCollection, formats: dict):
    rule = {"optimizer": formats.get("optimizer", "adam")}
    plain, kept = Run(alone, **rule), Run(alone, **formats)
    for seed in range(40):
        expected, found = plain.step(seed % 4), kept.step(seed % 4)
    assert found == pytest.approx(expected, rel=0.05)


def test_masters_can_start_from_the_models_parameters(alone: ProcessGroupCollection):
    run = Run(alone, **AWARE)
    run.step(0)
    run.model.load_state_dict(TinyModel(seed=9, dtype=torch.bfloat16).state_dict())
    run.optimizer.reload_model_params()
    for name, _, state in run.optimizer.named_state():
        assert torch.equal(state["fp32_param"].read(), run.model.get_parameter(name).float())
