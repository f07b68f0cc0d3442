"""`parallel_state` as projects use it: groups against formulas, and values that user code sets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state as ps
from megatron.core.process_groups_config import (
    GradCommProcessGroups,
    ModelCommProcessGroups,
    ProcessGroupCollection,
)

Coordinates = dict[str, int]


def coordinates(rank: int, sizes: Coordinates) -> Coordinates:
    """Return the place of ``rank`` on each axis; the first axis varies fastest."""
    place = {}
    for axis, size in sizes.items():
        place[axis] = rank % size
        rank //= size
    return place


def ranks_that_share(rank: int, sizes: Coordinates, world: int, *axes: str) -> list[int]:
    """Return the ranks whose places differ from ``rank``'s at most on ``axes``."""
    here = coordinates(rank, sizes)
    there = ((other, coordinates(other, sizes)) for other in range(world))
    return [other for other, at in there if all(at[a] == here[a] for a in at if a not in axes)]


@pytest.fixture
def start() -> Iterator[Callable[[int, int], None]]:
    """Return a function that makes this process one rank of a world; collectives do nothing."""
    yield lambda rank, world: dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world
    )
    ps.destroy_model_parallel()
    dist.destroy_process_group()


def random_layout(rng: random.Random) -> dict[str, int]:
    """Return degrees of a world of at most 768 ranks."""
    while True:
        layout = {
            "tp": rng.choice((1, 2, 3, 4, 8)),
            "cp": rng.choice((1, 1, 2, 3)),
            "pp": rng.choice((1, 2, 3, 4)),
            "dp": rng.choice((1, 2, 4, 6, 12)),
            "ep": rng.choice((1, 1, 2, 4)),
        }
        layout["expt_tp"] = rng.choice((1, layout["tp"]))
        layout["world"] = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
        if layout["world"] % (layout["expt_tp"] * layout["ep"] * layout["pp"]) == 0:
            return layout


@pytest.mark.parametrize("seed", range(12))
def test_groups_of_random_layouts_hold_the_ranks_of_the_formula(
    seed: int, start: Callable[[int, int], None]
) -> None:
    rng = random.Random(seed)
    layout = random_layout(rng)
    if seed == 0:
        layout = {"tp": 8, "cp": 2, "pp": 4, "dp": 12, "ep": 4, "expt_tp": 2, "world": 768}
    world, pp = layout["world"], layout["pp"]
    rank = rng.randrange(world)
    order = "tp-cp-ep-dp-pp"
    if layout["ep"] == 1 and layout["expt_tp"] == layout["tp"]:
        order = rng.choice((order, "tp-cp-ep-pp-dp", "tp-pp-dp-cp-ep"))
    start(rank, world)
    ps.initialize_model_parallel(
        layout["tp"],
        pp,
        context_parallel_size=layout["cp"],
        expert_model_parallel_size=layout["ep"],
        expert_tensor_parallel_size=layout["expt_tp"],
        order=order,
    )
    sizes = {"tp": layout["tp"], "cp": layout["cp"], "ep": 1, "dp": layout["dp"], "pp": pp}
    expt_dp = world // (layout["expt_tp"] * layout["ep"] * pp)
    expert = {"tp": layout["expt_tp"], "cp": 1, "ep": layout["ep"], "dp": expt_dp, "pp": pp}
    if layout["ep"] == 1 and layout["expt_tp"] == layout["tp"]:
        expert = sizes
    dense = {axis: sizes[axis] for axis in order.split("-")}
    sparse = {axis: expert[axis] for axis in order.split("-")}

    def check(group: dist.ProcessGroup | None, grid: Coordinates, *axes: str) -> None:
        assert group is not None
        assert dist.get_process_group_ranks(group) == ranks_that_share(rank, grid, world, *axes)

    check(ps.get_tensor_model_parallel_group(), dense, "tp")
    check(ps.get_pipeline_model_parallel_group(), dense, "pp")
    check(ps.get_context_parallel_group(), dense, "cp")
    check(ps.get_data_parallel_group(), dense, "dp")
    check(ps.get_data_parallel_group(with_context_parallel=True), dense, "dp", "cp")
    check(ps.get_model_parallel_group(), dense, "tp", "pp")
    check(ps.get_tensor_and_context_parallel_group(), dense, "tp", "cp")
    check(ps.get_amax_reduction_group(True, True), dense, "tp", "cp")
    check(ps.get_tensor_and_data_parallel_group(), dense, "tp", "dp")
    check(ps.get_tensor_and_data_parallel_group(True), dense, "tp", "dp", "cp")
    check(ps.get_data_parallel_group_gloo(True), dense, "dp", "cp")
    check(ps.get_expert_model_parallel_group(), sparse, "ep")
    check(ps.get_expert_tensor_parallel_group(), sparse, "tp")
    check(ps.get_expert_tensor_and_model_parallel_group(), sparse, "tp", "ep")
    check(ps.get_expert_tensor_model_pipeline_parallel_group(), sparse, "tp", "ep", "pp")
    check(ps.get_expert_data_parallel_group(), sparse, "dp", "cp")

    here = coordinates(rank, dense)
    pipeline = ranks_that_share(rank, dense, world, "pp")
    stage = here["pp"]
    assert ps.get_all_ranks() == "_".join(
        str(place) for place in (*(here[a] for a in ("tp", "dp", "cp", "pp")),
                                 coordinates(rank, sparse)["ep"])
    )  # fmt: skip
    assert ps.get_pipeline_model_parallel_next_rank() == pipeline[(stage + 1) % pp]
    assert ps.get_pipeline_model_parallel_prev_rank() == pipeline[stage - 1]
    assert ps.get_pipeline_model_parallel_first_rank() == pipeline[0]
    assert ps.get_pipeline_model_parallel_last_rank() == pipeline[-1]
    assert ps.is_rank_in_embedding_group() == (stage in (0, pp - 1))
    assert ps.is_rank_in_position_embedding_group() == (stage == 0)
    assert ps.get_tensor_model_parallel_src_rank() == rank - here["tp"] or order[:2] != "tp"

    generator = ps.RankGenerator(**sizes, order=order)
    assert generator.world_size == world
    for token in ("tp", "dp", "pp", "tp-pp", "dp-cp", "tp-dp-cp"):
        groups = generator.get_ranks(token)
        assert sorted(sum(groups, [])) == list(range(world))
        assert ranks_that_share(rank, dense, world, *token.split("-")) in groups
        mask = generator.get_mask(generator.order, token)
        assert groups == ps.generate_masked_orthogonal_rank_groups(
            world, generator.ordered_size, mask
        )


def test_user_code_sets_ranks_sizes_and_virtual_stages(start: Callable[[int, int], None]) -> None:
    ps.set_tensor_model_parallel_rank(1)
    ps.set_tensor_model_parallel_world_size(2)
    assert (ps.get_tensor_model_parallel_rank(), ps.get_expert_tensor_parallel_rank()) == (1, 1)
    assert ps.get_expert_tensor_parallel_world_size() == 2
    assert ps.get_data_parallel_world_size() == ps.get_context_parallel_rank() == 0
    with pytest.raises(AssertionError, match="not initialized"):
        ps.get_tensor_model_parallel_group()
    ps.destroy_model_parallel()

    start(5, 8)
    ps.initialize_model_parallel(1, 4, 3)
    assert ps.get_virtual_pipeline_model_parallel_world_size() == 3
    ps.set_virtual_pipeline_model_parallel_rank(2)
    assert ps.get_virtual_pipeline_model_parallel_rank() == 2
    with pytest.raises(AssertionError, match="vp_stage must be passed"):
        ps.is_pipeline_last_stage(ignore_virtual=False)
    ps.set_pipeline_model_parallel_rank(3)
    assert ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=2)
    assert not ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=0)
    assert ps.get_pipeline_model_parallel_next_rank() == 1
    ps.set_pipeline_model_parallel_rank(None)
    assert ps.get_pipeline_model_parallel_rank() == 2
    ps.set_data_parallel_rank(7)
    assert ps.get_data_parallel_rank() == ps.get_data_parallel_rank(True) == 7
    ps.destroy_model_parallel()
    assert ps.get_virtual_pipeline_model_parallel_world_size() is None

    with pytest.raises(RuntimeError, match="greater than 1"):
        ps.initialize_model_parallel(virtual_pipeline_model_parallel_size=2)
    with pytest.raises(RuntimeError, match="world_size"):
        ps.initialize_model_parallel(3)
    # In v0.14's order: tp, pp, virtual, backend, sharp, cp, levels, ep.
    ps.initialize_model_parallel(
        1, 4, None, None, False, 1, None, 2,
        get_embedding_ranks=lambda ranks: ranks[1:3], create_gloo_process_groups=False,
    )  # fmt: skip
    assert ps.get_expert_model_parallel_world_size() == 2
    assert dist.get_process_group_ranks(ps.get_embedding_group()) == [3, 5]
    assert ps.is_rank_in_embedding_group()
    with pytest.raises(AssertionError, match="gloo"):
        ps.get_data_parallel_group_gloo()


def test_collections_take_megatron_cores_names(start: Callable[[int, int], None]) -> None:
    start(3, 4)
    ps.initialize_model_parallel(2, context_parallel_size=2)
    groups = ModelCommProcessGroups.use_mpu_process_groups(["tp", "hcp"])
    assert groups.tp is ps.get_tensor_model_parallel_group()
    assert groups.hcp == ps.get_hierarchical_context_parallel_groups()
    of_gradients = GradCommProcessGroups()
    of_gradients.dp = ps.get_data_parallel_group()
    assert of_gradients.dp.size() == 1
    given = ProcessGroupCollection(tp=groups.tp, hcp=None)  # None: not given
    assert given.tp is groups.tp
    with pytest.raises(ValueError, match="Invalid process groups requested"):
        ModelCommProcessGroups.use_mpu_process_groups(["xx"])
    with pytest.warns(UserWarning, match="nccl or gloo"):  # this world has neither
        ps.update_pg_timeout(timedelta(minutes=1), dist.group.WORLD)


def test_a_memory_buffer_is_used_again() -> None:
    buffer = ps.get_global_memory_buffer()
    first = buffer.get_tensor([2, 3], torch.float32, "a")
    first.fill_(1)
    again = buffer.get_tensor((4,), torch.float32, "a")
    assert again.data_ptr() == first.data_ptr()
    assert buffer.get_tensor((4,), torch.float64, "a").data_ptr() != first.data_ptr()
    ps.destroy_global_memory_buffer()
    assert ps.get_global_memory_buffer() is not buffer


def test_a_rank_generator_names_an_axis_without_a_place() -> None:
    with pytest.raises(RuntimeError, match=r"size of \(pp\) is \(2\)"):
        ps.RankGenerator(tp=2, ep=1, dp=1, pp=2, cp=1, order="tp-dp")
    with pytest.raises(AssertionError):
        ps.RankGenerator(tp=1, ep=2, dp=1, pp=1, cp=2, order="tp-cp-ep-dp-pp")
    generator = ps.RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="TP-DP", rank_offset=8)
    assert generator.get_ranks("dp") == [[8, 10], [9, 11]]
