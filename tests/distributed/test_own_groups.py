"""Models on process groups that a program makes itself, by HyperCommGrid or one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks


def three_steps(groups: ProcessGroupCollection) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a GPT with its wrapper and optimizer."""
    config = tiny_config(tensor_model_parallel_size=groups.tp.size())
    torch.manual_seed(1)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(),
        GPTModel(config, get_gpt_layer_local_spec(config=config), 128, 16, pg_collection=groups),
        pg_collection=groups,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=1.0), [model], pg_collection=groups
    )
    ids = torch.randint(0, 128, (3, 2, 17), generator=torch.Generator().manual_seed(7))
    losses, norms = [], []
    for batch in ids.chunk(groups.dp.size(), dim=1)[groups.dp.rank()]:
        model.zero_grad_buffer()
        positions = torch.arange(16).expand(len(batch), 16)
        loss: Tensor = model(batch[:, :-1], positions, None, labels=batch[:, 1:]).mean()
        loss.backward()
        model.finish_grad_sync()
        _, norm, _ = optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm or 0))
    return losses, norms


def on_a_part_of_the_world(rank: int, world_size: int) -> Any:
    left, right = HyperCommGrid([2], ["tp"]), HyperCommGrid([2, 1], ["tp", "dp"], rank_offset=2)
    tp, other_tp, dp = left.create_pg("tp"), right.create_pg("tp"), right.create_pg(["dp"])
    if rank < 2:
        assert other_tp is None
        groups = ProcessGroupCollection()
        groups.tp = tp
        groups.dp = groups.pp  # set one by one, as scripts do
    else:
        groups = ProcessGroupCollection(tp=right.get_pg("tp"), dp=dp)
    return three_steps(groups)


@pytest.mark.feature("Layouts: groups made by HyperCommGrid, several models on one world")
def test_a_gpt_on_groups_of_ones_own_trains_as_one_process_does() -> None:
    losses, norms = three_steps(one_process_groups())
    assert losses[0] > losses[-1]
    for rank in run_ranks(on_a_part_of_the_world, 4):
        for mine, alone in zip(rank, (losses, norms), strict=True):
            torch.testing.assert_close(
                torch.tensor(mine), torch.tensor(alone), **tolerances.of(torch.float32)
            )


def groups_of_a_grid(rank: int, world_size: int) -> Any:
    grid = HyperCommGrid([2, 1, 2], ["tp", "cp", "dp"])
    return {
        name: dist.get_process_group_ranks(grid.create_pg(dims))
        for name, dims in {"tp": "tp", "dp_cp": ["dp", "cp"], "all": ["dp", "tp", "cp"]}.items()
    } | {"again": grid.get_pg(["cp", "dp"]) is grid.get_pg(["dp", "cp"])}


def test_a_grid_makes_the_groups_that_span_its_axes() -> None:
    assert run_ranks(groups_of_a_grid, 4)[3] == {
        "tp": [2, 3],
        "dp_cp": [1, 3],
        "all": [0, 1, 2, 3],
        "again": True,
    }
