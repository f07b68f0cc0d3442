"""Mamba layers whose sequences lie on several ranks: whole and packed ones, groups shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from tests.distributed.test_context_parallel_gpt import VOCABULARY, gradients
from tests.support import tolerances
from tests.support.one_process import one_process_groups, tiny_config
from tests.support.ranks import run_ranks

LENGTH, DOCUMENTS = 24, ((24,), (8, 16))
GROUPS = (1, 2, 8)  # of eight heads: fewer than ranks, as many heads as groups


def build(num_groups: int, groups: Any) -> MambaModel:
    config = tiny_config(
        params_dtype=torch.float64,
        mamba_state_dim=5,
        mamba_head_dim=8,
        mamba_num_groups=num_groups,
        cp_comm_type="allgather",
    )
    torch.manual_seed(1)
    return MambaModel(
        config,
        mamba_stack_spec,
        VOCABULARY,
        LENGTH,
        hybrid_override_pattern="M*",
        pg_collection=groups,
    )


def on_ranks(rank: int, size: int) -> dict[tuple[int, tuple[int, ...]], dict[str, Tensor]]:
    results = {}
    for num_groups in GROUPS:
        for documents in DOCUMENTS:
            groups = ProcessGroupCollection(cp=dist.group.WORLD)
            model = build(num_groups, groups)
            results[num_groups, documents] = found = gradients(model, groups, documents)
            for x in found.values():
                dist.all_reduce(x)
    return results


@pytest.mark.feature("Context parallelism: Mamba layers trade tokens for heads, packed or not")
def test_four_ranks_of_a_sequence_have_the_gradients_of_one() -> None:
    for at, found in run_ranks(on_ranks, 4)[0].items():
        alone = one_process_groups()
        expected = gradients(build(at[0], alone), alone, at[1])
        torch.testing.assert_close(
            found, expected, **tolerances.of(torch.float64), msg=lambda m, at=at: f"{at}: {m}"
        )
