"""Short-lived checkpoints on nodes: each rank has a directory that the others cannot see."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.all_ranks import SaveFailed
from megatron.core.dist_checkpointing.formats import Contents
from megatron.core.dist_checkpointing.local import Replication, find_local, load_local, save_local
from megatron.core.dist_checkpointing.records import OPTIMIZER_PREFIX, from_param
from megatron.core.params.param_info import ParamInfo
from megatron.training.checkpointing.load import load_run
from megatron.training.checkpointing.non_persistent import transient
from megatron.training.checkpointing.save import save_run
from tests.support.ranks import run_ranks
from tests.support.tiny_run import (
    advance,
    assert_equal,
    counters,
    options,
    parts_of_layout,
    values,
)

ALGORITHMS = ["fully_parallel", "atomic"]
COPIES = {"replication": True, "replication_jump": 1}
RANKS, TP = 4, 2


def config_of(root, rank, more):
    place = str(Path(root) / f"node{rank}")
    local = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": place}
    return options(Path(root) / "ck", **local, **more)


def save_both(rank, world_size, root, more):
    """Step 2 is kept, steps 3 and 4 are saved on the nodes."""
    parts, config = parts_of_layout(world_size, TP), config_of(root, rank, more)
    advance(parts, 2)
    save_run(config, parts, counters(2), asked={})
    for iteration in (3, 4):
        advance(parts, 1)
        torch.manual_seed(100 * iteration + rank)
        save_on_the_nodes(config, parts, iteration)


def save_on_the_nodes(config, parts, iteration):
    save_run(transient(config), parts, counters(iteration), asked={}, is_local=True)


def load_newest(rank, world_size, root, more, tp=TP):
    """The iteration that is gone on from, with everything as it was then, and what was said."""
    parts = parts_of_layout(world_size, tp, seed=9)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        loaded = load_run(config_of(root, rank, more), parts)
    trained = parts_of_layout(world_size, tp)
    advance(trained, loaded.iteration)
    assert_equal(values(parts), values(trained))
    assert loaded.counters == counters(loaded.iteration)
    if loaded.iteration > 2:
        generator = torch.Generator().manual_seed(100 * loaded.iteration + rank)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=generator))
    return loaded.iteration, said.getvalue()


def newest(root, more, **layout):
    results = run_ranks(load_newest, layout.get("ranks", RANKS), root, more, layout.get("tp", TP))
    assert len({iteration for iteration, _ in results}) == 1
    return results[0]


def parts_on(root, rank):
    return sorted(str(path.relative_to(root)) for path in root.glob(f"node{rank}/rank_*/iter_*"))


def damage(root, rank, part):
    (path,) = (root / f"node{rank}" / f"rank_0000{part}").glob("iter_*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.feature("Checkpoints: on the nodes, with copies on other nodes")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_lost_node_and_a_damaged_part_come_from_copies(tmp_path, algorithm):
    more = {"non_persistent_local_ckpt_algo": algorithm, **COPIES}
    run_ranks(save_both, RANKS, tmp_path, more)
    newest_only = ["node1/rank_00000/iter_0000004", "node1/rank_00001/iter_0000004"]
    assert parts_on(tmp_path, 1) == newest_only
    assert newest(tmp_path, more)[0] == 4
    shutil.rmtree(tmp_path / "node1")
    damage(tmp_path, 3, 3)
    iteration, said = newest(tmp_path, more)
    assert iteration == 4
    assert "node3/rank_00003/iter_0000004/__0_0.safetensors is damaged" in said
    damage(tmp_path, 0, 3)
    iteration, said = newest(tmp_path, more)
    assert iteration == 2
    note = "NOTE: the local checkpoint of iteration 4 lacks the parts of ranks [3]"
    assert note in said


def test_without_copies_a_lost_node_means_the_checkpoint_that_is_kept(tmp_path):
    run_ranks(save_both, RANKS, tmp_path, {})
    assert parts_on(tmp_path, 1) == ["node1/rank_00001/iter_0000004"]
    assert newest(tmp_path, {})[0] == 4
    shutil.rmtree(tmp_path / "node1")
    assert newest(tmp_path, {})[0] == 2


def test_another_layout_goes_on_from_the_checkpoint_that_is_kept(tmp_path):
    run_ranks(save_both, RANKS, tmp_path, {})
    for layout in ({"ranks": 2}, {"tp": 1}):
        iteration, said = newest(tmp_path, {}, **layout)
        assert iteration == 2
        assert "iteration 4 is of another layout or number of ranks; going on from" in said


def test_what_is_kept_is_loaded_when_it_is_newer(tmp_path):
    run_ranks(save_both, RANKS, tmp_path, {})
    os.utime(tmp_path / "ck" / "latest_checkpointed_iteration.txt")
    assert newest(tmp_path, {})[0] == 2


def fail_to_save(rank, world_size, root, faults):
    parts, config = parts_of_layout(world_size, TP), config_of(root, rank, COPIES)
    advance(parts, 5)
    os.environ["FAULTS"] = faults
    with pytest.raises(SaveFailed) as caught:
        save_on_the_nodes(config, parts, 5)
    return str(caught.value)


def die_in_a_save(rank, world_size, root, faults):
    os.environ["FAULTS"] = faults
    save_on_the_nodes(config_of(root, rank, COPIES), parts_of_layout(world_size, TP), 5)


def test_a_save_that_fails_or_dies_on_one_rank_leaves_the_one_before(tmp_path):
    run_ranks(save_both, RANKS, tmp_path, COPIES)
    for faults in ("save.tensor:enospc:rank2", "save.copy:raise:rank2"):
        messages = run_ranks(fail_to_save, RANKS, tmp_path, faults)
        assert all("earlier checkpoints are complete" in m and "rank 2: " in m for m in messages)
        assert newest(tmp_path, COPIES)[0] == 4
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(die_in_a_save, RANKS, tmp_path, "save.before_rename:kill:rank2", timeout_s=30)
    assert newest(tmp_path, COPIES)[0] == 4


def fully_sharded_halves(rank, world_size, root):
    """Sixteen-bit weights that lie in the memory of their main parameters, saved and loaded."""
    info, group = ParamInfo(global_shape=(50,)), dist.group.WORLD

    def records(values):
        weights = [from_param(k, info, v, dtype=torch.bfloat16) for k, v in values.items()]
        return weights + [from_param(f"{OPTIMIZER_PREFIX}{k}", info, v) for k, v in values.items()]

    saved = {f"w{i}": torch.rand(50) for i in range(20)}
    layout, loaded = {"world_size": 1}, {key: torch.zeros(50) for key in saved}
    made = Contents(tensors=records(saved), common={}, layout=layout)
    save_local(root, 1, made, group, share_work=True, replication=Replication())
    found, _ = find_local(root, layout, 0, group)
    load_local(found, records(loaded), group)
    return [key for key in saved if not torch.equal(saved[key], loaded[key])]


def test_main_parameters_are_loaded_behind_the_weights_in_their_memory(tmp_path):
    assert run_ranks(fully_sharded_halves, 1, tmp_path) == [[]]
