"""GEMMs fused with collectives of sequence parallelism: the values of separate ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel import overlapped_linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.overlapped_linear import overlap_layers
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from tests import tolerances
from tests.distributed.test_tensor_parallel_model import batch, build
from tests.host_gpu import symmetric_memory
from tests.ranks import run_ranks
from tests.unit.one_process import tiny_config

OFF = {"tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False}
FLAGS: dict[str, dict[str, bool]] = {
    "all": {"tp_comm_overlap_rs_dgrad": True},
    "default": {},
    "gathers": {"tp_comm_overlap_rs": False},
    "scatters": {"tp_comm_split_ag": False},
    "gradients": {**OFF, "tp_comm_overlap_rs_dgrad": True},
}


def fused_and_separate(rank: int, world_size: int) -> dict[str, list[str]]:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    tokens, labels, positions = batch()
    kept = symmetric_memory.register("CPU")
    calls = {}

    def gradients(model: Any, *, later: bool) -> dict[str, Any]:
        loss = model(tokens, positions, None, labels=labels).mean()
        if later:
            queue = WeightGradQueue()
            with queue.collecting():
                loss.backward()
            queue.run()
        else:
            loss.backward()
        return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}

    with mock.patch.object(overlapped_linear, "_why_no_symmetric_memory", return_value=None):
        for case in ("gpt2", "llama"):
            wanted = gradients(build(case, groups, 128, sequence_parallel=True), later=False)
            for name, flags in FLAGS.items():
                for later in (False, True):
                    model = build(case, groups, 128, sequence_parallel=True)
                    assert overlap_layers(model, groups.tp, tiny_config(**flags)) is None
                    symmetric_memory.calls.clear()
                    found = gradients(model, later=later)
                    torch.testing.assert_close(found, wanted, **tolerances.of(torch.float64))
                calls[name] = list(symmetric_memory.calls)
    del kept
    return calls


@pytest.mark.feature("Speed: --tp-comm-overlap runs GEMMs fused with the collectives beside them")
def test_fused_layers_have_the_loss_and_gradients_of_separate_ones() -> None:
    for calls in run_ranks(fused_and_separate, 2):
        # Two layers, with two column and two row GEMMs each; the output layer is fused otherwise.
        assert calls["default"] == ["gather", "scatter"] * 4 + ["gather"] * 4
        assert calls["all"].count("scatter") == 4 + 4
        assert calls["gathers"].count("scatter") == 0
        assert calls["scatters"] == ["scatter"] * 4
        assert calls["gradients"] == ["scatter"] * 4


def without_memory(rank: int, world_size: int) -> list[str | None]:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    parallel = build("llama", groups, 128, sequence_parallel=True)
    reasons = [overlap_layers(parallel, groups.tp, tiny_config())]
    assert all(m.overlapped is None for m in parallel.modules() if hasattr(m, "overlapped"))
    whole = build("llama", groups, 128)
    assert any(isinstance(m, ColumnParallelLinear) for m in whole.modules())
    return [*reasons, overlap_layers(whole, groups.tp, tiny_config())]


def test_without_symmetric_memory_the_layers_stay_as_they_are() -> None:
    for no_memory, no_shards in run_ranks(without_memory, 2):
        assert no_memory == "it needs a GPU"
        assert no_shards is not None
        assert no_shards.startswith("no layer has sequence parallelism")
