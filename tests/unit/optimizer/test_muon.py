"""Muon against torch.optim, and what counts as one matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.muon import COEFFICIENTS, coefficients_of, orthogonalize, owners_of
from megatron.core.optimizer.param_groups import is_matrix
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, set_info
from tests.support import tolerances

NUMBERS = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}


class Model(nn.Module):
    """Matrices of both orientations, and what is none."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * 0.1)

        self.wide, self.tall, self.norm = drawn(12, 16), drawn(24, 8), drawn(16)
        self.embedding, self.gate = drawn(20, 16), drawn(1, 16)


def noise(step: int, name: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + len(name))
    return torch.randn(like.shape, generator=generator)


def updated(model: nn.Module, groups: ProcessGroupCollection, steps: int, **numbers: Any) -> None:
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{**NUMBERS, **numbers}), [model], pg_collection=groups
    )
    for step in range(steps):
        for name, param in model.named_parameters():
            param.grad = noise(step, name, param)
        optimizer.step()


@pytest.mark.feature("Optimizer: Muon for matrices, whole however they are cut; Adam for the rest")
@pytest.mark.parametrize(
    ("scale", "factor", "adjustment"),
    [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")],
)
@pytest.mark.parametrize("nesterov", [False, True])
def test_matrices_are_moved_as_torchs_muon_moves_them(
    alone: ProcessGroupCollection, nesterov: bool, scale: str, factor: float, adjustment: str
):
    ours, theirs = Model(), Model()
    updated(
        ours,
        alone,
        5,
        muon_fp32_matmul_prec="low",
        muon_coefficient_type="simple",
        muon_scale_mode=scale,
        muon_extra_scale_factor=factor,
        muon_momentum=0.95,
        muon_nesterov=nesterov,
    )
    matrices = [theirs.wide, theirs.tall]
    muon = torch.optim.Muon(
        matrices,
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=nesterov,
        eps=1e-7,
        adjust_lr_fn=adjustment,
    )
    adam = torch.optim.AdamW(
        [
            {"params": [theirs.embedding, theirs.gate], "weight_decay": 0.1},
            {"params": [theirs.norm], "weight_decay": 0.0},
        ],
        lr=0.02,
        fused=True,
    )
    for step in range(5):
        for name, param in theirs.named_parameters():
            param.grad = noise(step, name, param)
        muon.step()
        adam.step()
    for name in ("embedding", "gate", "norm"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("wide", "tall"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-7)


def test_muon_updates_no_part_of_the_parameters(alone: ProcessGroupCollection):
    model = Model()
    config = OptimizerConfig(**NUMBERS)
    optimizer = get_megatron_optimizer(config, [model], pg_collection=alone)
    with pytest.raises(AssertionError, match="all matrices at once"):
        optimizer.rule.step(1.0, {model.wide})


def test_lion_moves_by_the_sign_of_a_mean(alone: ProcessGroupCollection):
    model, plain = Model(), Model()
    updated(model, alone, 3, optimizer="lion", lion_beta1=0.9)
    for name, param in plain.named_parameters():
        mean, decay = torch.zeros_like(param), 0.0 if param.dim() == 1 else 0.1
        for step in range(3):
            grad = noise(step, name, param)
            direction = torch.sign(0.9 * mean + 0.1 * grad)
            param.data = param.data * (1 - 0.02 * decay) - 0.02 * direction
            mean = 0.98 * mean + 0.02 * grad
        torch.testing.assert_close(getattr(model, name), param, **tolerances.of(torch.float32))


@pytest.mark.parametrize(
    ("kind", "spread"), [("simple", 0.5), ("quintic", 0.2), ("polar_express", 0.01)]
)
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_the_result_is_nearly_orthogonal(kind: str, spread: float, shape: tuple[int, int]):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(matrix, coefficients_of(kind, len(COEFFICIENTS[kind]) + 5))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linalg.svdvals(found)
    assert (values - 1).abs().max() < spread
    torch.testing.assert_close(found, u @ torch.diag(torch.diag(u.T @ found @ v.T)) @ v)


def with_info(param: nn.Parameter, **info: Any) -> nn.Parameter:
    set_info(param, ParamInfo(global_shape=tuple(param.shape), **info))
    return param


@pytest.mark.parametrize(
    ("info", "split", "rows"),
    [
        ({}, True, [range(24)]),
        ({"blocks": (1, 1)}, False, [range(12), range(12, 24)]),
        (
            {"interleaved": (2, 1, 1)},
            True,
            [
                [r for r in range(24) if r % 4 < 2],
                [r for r in range(24) if r % 4 == 2],
                [r for r in range(24) if r % 4 == 3],
            ],
        ),
        ({"interleaved": (2, 1, 1)}, False, [range(24)]),
    ],
)
def test_what_lies_in_one_weight_is_made_orthogonal_by_itself(
    alone: ProcessGroupCollection, info: dict, split: bool, rows: list
):
    model, start = Model(), Model().tall.detach()
    with_info(model.tall, shard_dim=0, **info)
    updated(model, alone, 1, weight_decay=0.0, muon_split_qkv=split)
    for part in map(list, rows):
        gradient = noise(0, "tall", start)[part]
        direction = orthogonalize(gradient, coefficients_of("quintic", 5))
        expected = start[part] - 0.02 * max(len(part), 8) ** 0.5 * direction
        torch.testing.assert_close(model.tall.detach()[part], expected, rtol=1e-5, atol=1e-5)


def test_embeddings_outputs_and_vectors_are_no_matrices():
    weight = nn.Parameter(torch.zeros(4, 4))
    assert is_matrix("decoder.layers.0.mlp.router.weight", weight)
    assert not is_matrix("embedding.position_embeddings.weight", weight)
    assert not is_matrix("bias", nn.Parameter(torch.zeros(4)))
    assert not is_matrix("gate_weight", nn.Parameter(torch.zeros(1, 4)))
    assert not is_matrix("output_layer.weight", with_info(weight, is_embedding_or_output=True))


def test_work_goes_to_those_who_hold_some_and_have_least():
    spans = [[(0, 8), (8, 8)], [(0, 8), (8, 16)], [(0, 2), (2, 8)], [(0, 4), (4, 8)]]
    assert owners_of([(4, 2), (4, 4), (4, 2), (4, 2)], spans) == [0, 1, 0, 0]
    assert owners_of([], []) == []
