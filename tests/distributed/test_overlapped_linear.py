"""GEMMs fused with collectives of sequence parallelism: the values of separate ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.core import device
from megatron.core.parallel.process_groups_config import create_process_groups, make_grids
from megatron.core.tensor_parallel import overlap
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.overlap import overlap_layers
from megatron.core.tensor_parallel.weight_gradient import WeightGradQueue
from megatron.core.transformer.low_precision import recipe_of
from tests.distributed.test_tensor_parallel_model import batch, build
from tests.support import tolerances
from tests.support.host_gpu import symmetric_memory
from tests.support.one_process import tiny_config
from tests.support.ranks import run_ranks

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

    with mock.patch.object(overlap, "_why_no_symmetric_memory", return_value=None):
        for case in ("gpt2", "llama"):
            wanted = gradients(build(case, groups, 128, sequence_parallel=True), later=False)
            for name, flags in FLAGS.items():
                for later in (False, True):
                    model = build(case, groups, 128, sequence_parallel=True)
                    assert overlap_layers(model, groups.tp, tiny_config(**flags)) == (8, [])
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


def without_memory(rank: int, world_size: int) -> list[Any]:
    groups = create_process_groups(*make_grids(world_size, tp=2))
    parallel = build("llama", groups, 128, sequence_parallel=True)
    reasons = [overlap_layers(parallel, groups.tp, tiny_config())]
    assert all(m.overlap is None for m in parallel.modules() if hasattr(m, "overlap"))
    for layer in parallel.modules():
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.quantize(recipe_of(tiny_config(fp8="hybrid")), groups.tp)
    reasons.append(overlap_layers(parallel, groups.tp, tiny_config()))
    whole = build("llama", groups, 128)
    assert any(isinstance(m, ColumnParallelLinear) for m in whole.modules())
    return [*reasons, overlap_layers(whole, groups.tp, tiny_config())]


def test_without_symmetric_memory_the_layers_stay_as_they_are() -> None:
    why = "layers in fp8 or fp4, or with adapters, have no fused GEMM"
    for no_memory, quantized, no_shards in run_ranks(without_memory, 2):
        assert no_memory == (0, ["it needs a GPU"])
        assert quantized == (0, [why])
        assert no_shards == (0, ["no layer of this program has sequence parallelism"])


class SymmetricMemory:
    """What torch keeps by the name of a group, also after the group's end."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.mapped: list[str] = []  # each is a meeting of all ranks of the group

    def is_symm_mem_enabled_for_group(self, name: str) -> bool:
        return name in self.names

    def enable_symm_mem_for_group(self, name: str) -> None:
        self.names.add(name)

    def get_symm_mem_workspace(self, name: str, _: int) -> None:
        self.mapped.append(name)


def two_runs(rank: int, world_size: int) -> list[tuple[str | None, int]]:
    """Return for each run why it has no memory, and how often it was mapped so far.

    Before the second one a new process takes the place of rank 1.
    """
    memory = SymmetricMemory()
    found = []
    with (
        mock.patch.object(overlap, "require", side_effect=lambda *_: memory),
        mock.patch.object(device, "launches_kernels", return_value=True),
    ):
        for run in range(2):
            group = dist.new_group(range(world_size))
            for _ in range(2):  # model chunks
                reason = overlap._why_no_symmetric_memory(group)
            found.append((reason, len(memory.mapped)))
            if run == 0:
                store = dist.PrefixStore("second", c10d._get_default_store())
                dist.destroy_process_group()
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
                memory = SymmetricMemory() if rank == 1 else memory
    return found


def test_a_second_run_of_a_process_does_not_use_the_memory_of_the_first() -> None:
    reason = "an earlier run of this process has used symmetric memory: start new processes"
    first, second = run_ranks(two_runs, 2)
    assert first == [(None, 2), (reason, 2)]
    assert second == [(None, 2), (reason, 0)], "its peer would not come"
