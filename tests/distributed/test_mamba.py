"""Mamba layers whose sequences lie on several ranks: whole and packed ones, groups shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.models.mamba import MambaModel
from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_batch_on_this_cp_rank
from tests import tolerances
from tests.ranks import run_ranks
from tests.unit.one_process import one_process_groups, tiny_config

LENGTH, VOCABULARY, PACKED = 24, 50, (8, 16)
GROUPS = (1, 2, 8)  # of eight heads: fewer than ranks, as many heads as groups


def gradients(num_groups: int, groups: Any, is_packed: bool) -> dict[str, Tensor]:
    """This rank's terms of the loss and of each gradient."""
    config = tiny_config(
        params_dtype=torch.float64,
        mamba_state_dim=5,
        mamba_head_dim=8,
        mamba_num_groups=num_groups,
        cp_comm_type="allgather",
    )
    torch.manual_seed(1)
    model = MambaModel(
        config,
        mamba_stack_spec,
        VOCABULARY,
        LENGTH,
        hybrid_override_pattern="M*",
        pg_collection=groups,
    )
    ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(7))
    ends = torch.tensor([0, *PACKED]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends) if is_packed else None
    mine = get_batch_on_this_cp_rank(
        {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "position_ids": torch.arange(LENGTH).expand(2, LENGTH),
            "weights": torch.linspace(0.5, 1.5, 2 * LENGTH, dtype=torch.float64).view(2, LENGTH),
        },
        groups.cp,
        lengths=None if packed is None else packed.lengths,
    )
    losses = model(
        mine["tokens"],
        mine["position_ids"],
        None,
        labels=mine["labels"],
        packed_seq_params=packed,
    )
    loss = (losses * mine["weights"]).sum()
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **{n: g for n, g in named.items() if g is not None}}


def on_ranks(rank: int, size: int) -> dict[tuple[int, bool], dict[str, Tensor]]:
    results = {}
    for num_groups in GROUPS:
        for is_packed in (False, True):
            groups = ProcessGroupCollection(cp=dist.group.WORLD)
            results[num_groups, is_packed] = gradients(num_groups, groups, is_packed)
            for x in results[num_groups, is_packed].values():
                dist.all_reduce(x)
    return results


@pytest.mark.feature("Context parallelism: Mamba layers trade tokens for heads, packed or not")
def test_four_ranks_of_a_sequence_have_the_gradients_of_one() -> None:
    for (num_groups, is_packed), found in run_ranks(on_ranks, 4)[0].items():
        expected = gradients(num_groups, one_process_groups(), is_packed)
        torch.testing.assert_close(
            found,
            expected,
            **tolerances.of(torch.float64),
            msg=lambda m, at=(num_groups, is_packed): f"{at}: {m}",
        )
