"""One optimizer over ranks: the norm counts everything once, and all ranks decide alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import calc_params_l2_norm, count_zeros, global_norm
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.params.param_info import ParamInfo, set_info
from tests.support import tolerances
from tests.support.one_rank_training import ModelConfig, TinyModel, mean_loss, token_batch
from tests.support.ranks import run_ranks


def make_groups(**layout: Any) -> ProcessGroupCollection:
    return create_process_groups(*make_grids(dist.get_world_size(), **layout))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# A model spread over tp=2 x ep=2 (each expert on one rank of a pair): weights cut over tp, a
# vector that all hold, a copy that another rank counts, and two experts.
CUT, WHOLE, COPY, EXPERTS = (8, 4), (5,), (3,), (2, 6)


def _spread(rank: int, world_size: int) -> tuple[float, int, float]:
    groups = make_groups(tp=2, ep=2, expt_tp=1)
    tp, ep = groups.tp.rank(), groups.ep.rank()
    cut = numbers(*CUT, seed=1).chunk(2)[tp].clone()
    cut[0] = 0
    parts = {
        "cut": (ParamInfo(global_shape=CUT, shard_dim=0, shard_index=tp, shard_count=2), cut),
        "whole": (ParamInfo(global_shape=WHOLE), numbers(*WHOLE, seed=2)),
        "copied": (ParamInfo(global_shape=COPY, is_duplicate=True), numbers(*COPY, seed=3)),
        "expert": (
            ParamInfo(global_shape=EXPERTS[1:], is_expert=True),
            numbers(*EXPERTS, seed=4)[ep],
        ),
    }
    model = nn.ParameterDict({name: nn.Parameter(t) for name, (_, t) in parts.items()})
    for name, (info, _) in parts.items():
        set_info(model[name], info)
    entries = list(parts.values())
    return (
        global_norm(entries, groups),
        count_zeros(entries, groups),
        calc_params_l2_norm([model], groups),
    )


def test_the_norm_counts_shared_and_copied_parameters_once():
    cut = numbers(*CUT, seed=1)
    cut[0] = cut[4] = 0
    counted = [cut, numbers(*WHOLE, seed=2), numbers(*EXPERTS, seed=4)]
    expected = math.sqrt(sum(float(t.double().square().sum()) for t in counted))
    results = run_ranks(_spread, 4)
    assert len(set(results)) == 1
    norm, zeros, params_norm = results[0]
    assert norm == params_norm == pytest.approx(expected, rel=1e-6)
    assert zeros == 2 * CUT[1]


def _padded_zeros(rank: int, world_size: int) -> int:
    groups = make_groups(tp=2)
    info = ParamInfo(global_shape=(9, 2), shard_dim=0, shard_index=rank, shard_count=2)
    return count_zeros([(info, torch.zeros(8, 2))], groups)


def test_vocabulary_padding_is_not_counted_however_it_is_spread():
    assert run_ranks(_padded_zeros, 2) == [18, 18]


def _overflow_in_one_rank(rank: int, world_size: int, where: str) -> list[Any]:
    """Only the last rank's part of the model overflows."""
    groups = make_groups(tp=2) if where == "cut" else make_groups(ep=2)
    info = (
        ParamInfo(global_shape=(4,), shard_dim=0, shard_index=rank, shard_count=2)
        if where == "cut"
        else ParamInfo(global_shape=(2,), is_expert=True)
    )
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(2, dtype=torch.float16))})
    set_info(model["weight"], info)
    config = OptimizerConfig(lr=0.1, initial_loss_scale=8.0, hysteresis=1)
    optimizer = get_megatron_optimizer(config, [model], pg_collection=groups)
    model["weight"].grad = torch.full((2,), float("inf") if rank == 1 else 1.0).half()
    result = optimizer.step()
    return [result, model["weight"].tolist(), float(optimizer.get_loss_scale())]


@pytest.mark.parametrize("where", ["cut", "expert"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(where: str):
    skipped = [(False, None, None), [1.0, 1.0], 4.0]
    assert run_ranks(_overflow_in_one_rank, 2, where) == [skipped, skipped]


def _nan_in_one_rank(rank: int, world_size: int) -> str:
    """The second tensor-parallel rank has it, in a parameter that the first one counts."""
    groups = make_groups(tp=2)
    model = nn.Linear(2, 2)
    ddp_config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    ddp = DistributedDataParallel(ModelConfig(), ddp_config, model, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0), [ddp], pg_collection=groups)
    (ddp(torch.ones(1, 2)) * (1.0 if rank == 0 else float("nan"))).sum().backward()
    finalize_model_grads([ddp])
    try:
        optimizer.step()
    except FloatingPointError as error:
        return str(error)
    return "no error"


def test_every_rank_names_the_one_that_has_the_nan():
    culprit = "rank 1 has a NaN or infinite gradient in weight, bias"
    assert run_ranks(_nan_in_one_rank, 2) == [culprit] * 2


def _train(
    rank: int, world_size: int, dtype: torch.dtype, ddp_options: dict
) -> tuple[list[float], list[tuple], dict]:
    """Losses of this rank, norms and zero counts, final weights."""
    groups = make_groups()
    model = TinyModel(dtype=dtype)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp_options)
    ddp = DistributedDataParallel(ModelConfig(), ddp_config, model, pg_collection=groups)
    config = OptimizerConfig(lr=0.01, clip_grad=0.5, log_num_zeros_in_grad=True)
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
    losses, counts = [], []
    for seed in range(20):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = mean_loss(ddp, token_batch(8, seed).chunk(world_size)[rank])
        loss.backward()
        finalize_model_grads([ddp])
        losses.append(loss.item())
        counts.append(optimizer.step()[1:])
    return losses, counts, model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_replicas_train_like_one_process(dtype: torch.dtype):
    ((losses, counts, _),) = run_ranks(_train, 1, dtype, {})
    options = {"overlap_grad_reduce": True, "bucket_size": 100}
    first, second = run_ranks(_train, 2, dtype, options)
    torch.testing.assert_close(first[1:], second[1:], **tolerances.BITWISE)
    together = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
    allowed = tolerances.LAYOUT_LOSS if dtype is torch.float32 else tolerances.of(dtype)
    torch.testing.assert_close(together, losses, **allowed)
    if dtype is torch.float32:
        torch.testing.assert_close(first[1], counts, **allowed)
