"""Who talks to whom: grids of integers, and the groups made from them for any rank of any world."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Iterator
from math import prod

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.parallel import parallel_state, rank_grid
from megatron.core.parallel.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)
from megatron.core.parallel.rank_grid import RankGrid

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")


def members(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def test_the_examples_of_the_grid_hold() -> None:
    assert doctest.testmod(rank_grid).failed == 0


@pytest.mark.parametrize("order", ORDERS)
def test_every_axis_cuts_the_world_into_disjoint_groups_of_its_size(order: str) -> None:
    for sizes in itertools.product((1, 2, 3), (1, 2), (1,), (1, 2, 4), (1, 3)):
        grid = RankGrid(dict(zip(order.split("-"), sizes, strict=True)))
        for number in (1, 2, 3):
            for axes in itertools.combinations(grid.sizes, number):
                groups = grid.groups(*axes)
                assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
                assert {len(g) for g in groups} == {prod(grid.sizes[a] for a in axes)}
                free = [a for a in grid.sizes if a not in axes]
                for group in groups:
                    held = {tuple(grid.coordinate(r)[a] for a in free) for r in group}
                    assert len(held) == 1


def test_coordinates_and_ranks_are_inverse() -> None:
    grid = RankGrid({"tp": 2, "cp": 3, "dp": 2, "pp": 2}, first_rank=10)
    assert [grid.rank(**grid.coordinate(r)) for r in range(10, 34)] == list(range(10, 34))


def test_a_degree_below_one_and_an_unknown_axis_are_errors() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        RankGrid({"tp": 0})
    with pytest.raises(ValueError, match="no axis"):
        RankGrid({"tp": 2}).groups("xx")


@pytest.fixture
def world_of_16(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one rank of 16; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=16)
    yield request.param
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def collection(**degrees: int) -> ProcessGroupCollection:
    return create_process_groups(*make_grids(16, **degrees))


@pytest.mark.parametrize("world_of_16", [0, 5, 15], indirect=True)
def test_groups_of_a_rank_hold_it_and_have_the_degrees(world_of_16: int) -> None:
    groups = collection(tp=2, pp=2, cp=2, ep=2)
    sizes = {
        "tp": 2, "pp": 2, "cp": 2, "dp": 2, "mp": 4, "tp_cp": 4, "tp_dp": 4, "tp_dp_cp": 8,
        "dp_cp": 4, "ep": 2, "expt_tp": 2, "tp_ep": 4, "tp_ep_pp": 8, "expt_dp": 2, "world": 16,
    }  # fmt: skip
    for name, size in sizes.items():
        group = vars(groups)[name]
        assert group.size() == size, name
        assert world_of_16 in members(group), name
    assert members(groups.tp) == [world_of_16 // 2 * 2, world_of_16 // 2 * 2 + 1]
    assert members(groups.pp) == [world_of_16 % 8, world_of_16 % 8 + 8]


@pytest.mark.parametrize("world_of_16", [0, 3, 7, 12], indirect=True)
def test_the_ends_of_a_pipeline_share_the_embedding(world_of_16: int) -> None:
    groups = collection(pp=4)
    stage = world_of_16 // 4
    ends = [world_of_16 % 4, world_of_16 % 4 + 12]
    assert members(groups.embd) == (ends if stage in (0, 3) else [world_of_16])
    assert members(groups.pos_embd) == [world_of_16]
    assert groups.is_first_stage == (stage == 0)
    assert groups.is_last_stage == (stage == 3)


@pytest.mark.parametrize("world_of_16", [0, 7, 14], indirect=True)
def test_neighbours_of_a_sequence_and_the_ring_over_sets_of_them(world_of_16: int) -> None:
    sizes = {"context_parallel_size": 8, "hierarchical_context_parallel_sizes": [2, 4]}
    parallel_state.initialize_model_parallel(2, **sizes)
    inner, outer = parallel_state.get_hierarchical_context_parallel_groups()
    tp, place = world_of_16 % 2, world_of_16 // 2
    assert members(inner) == [tp + 2 * n for n in (place // 2 * 2, place // 2 * 2 + 1)]
    assert members(outer) == [tp + 2 * n for n in range(place % 2, 8, 2)]
    assert parallel_state.get_context_parallel_global_ranks() == [tp + 2 * n for n in range(8)]
    with pytest.raises(ValueError, match="2 x 2 context-parallel ranks are not 8"):
        create_process_groups(*make_grids(16, tp=2, cp=8), context_levels=(2, 2))


@pytest.mark.parametrize("world_of_16", [6], indirect=True)
def test_equal_members_share_one_group(world_of_16: int) -> None:
    groups = collection(tp=2)
    assert groups.cp is groups.pp is groups.ep
    assert groups.dp is groups.dp_cp
    assert groups.world is dist.group.WORLD


@pytest.mark.parametrize("world_of_16", [9], indirect=True)
def test_the_facade_answers_from_the_installed_groups(world_of_16: int) -> None:
    with pytest.raises(AssertionError, match="not initialized"):
        parallel_state.get_tensor_model_parallel_rank()
    parallel_state.initialize_model_parallel(2, 2, context_parallel_size=2)
    assert parallel_state.is_initialized()
    assert parallel_state.get_tensor_model_parallel_rank() == 1
    assert parallel_state.get_tensor_model_parallel_src_rank() == 8
    assert parallel_state.get_pipeline_model_parallel_rank() == 1
    assert parallel_state.is_pipeline_last_stage()
    assert not parallel_state.is_pipeline_first_stage()
    assert parallel_state.get_pipeline_model_parallel_first_rank() == 1
    assert parallel_state.get_data_parallel_world_size() == 2
    assert parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 4
    assert parallel_state.get_context_parallel_rank() == 0
    with pytest.raises(AssertionError, match="already initialized"):
        parallel_state.initialize_model_parallel()


@pytest.mark.parametrize(
    ("degrees", "message"),
    [({"tp": 3}, "16 ranks cannot be divided into blocks of 3"), ({"ep": 5}, "blocks of 5")],
)
def test_degrees_that_do_not_divide_the_world_are_errors(
    degrees: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_grids(16, **degrees)


def test_dense_and_expert_layers_must_lie_on_the_same_pipelines() -> None:
    make_grids(16, pp=2, ep=2, order=ORDERS[0])
    with pytest.raises(ValueError, match="different pipelines"):
        make_grids(16, pp=2, ep=2, order=ORDERS[1])


@pytest.mark.parametrize("world_of_16", [5], indirect=True)
def test_a_grid_of_ones_own_names_what_is_wrong(world_of_16: int) -> None:
    grid = HyperCommGrid([2, 3, 2], ["tp", "cp", "dp"], rank_offset=4)
    assert grid._gen_rank_enum(["dp", "tp"]) == [[4, 5, 10, 11], [6, 7, 12, 13], [8, 9, 14, 15]]
    with pytest.raises(KeyError, match="Process group for dp-tp hasn't been created"):
        grid.get_pg(["dp", "tp"])
    assert members(grid.create_pg(["dp", "tp"], group_desc="both")) == [4, 5, 10, 11]
    with pytest.raises(KeyError, match="has already been created"):
        grid.create_pg(["tp", "dp"])
    for dims in ("pp", [], ["tp", "tp"], ["tp", "ep"]):
        with pytest.raises(ValueError, match="not different axes"):
            grid.create_pg(dims)
    with pytest.raises(RuntimeError, match="over sized with world size 16"):
        HyperCommGrid([4, 4], ["tp", "dp"], rank_offset=4)
    with pytest.raises(ValueError, match=r"len\(shape\) .* != len\(dim_names\)"):
        HyperCommGrid([2, 2], ["tp"])
    with pytest.raises(ValueError, match="different names"):
        HyperCommGrid([2, 2], ["tp", "tp"])


@pytest.mark.parametrize("world_of_16", [9], indirect=True)
def test_groups_that_follow_from_others_need_not_be_given(world_of_16: int) -> None:
    tp, dp = (HyperCommGrid([2, 8], ["tp", "dp"]).create_pg(name) for name in ("tp", "dp"))
    groups = ProcessGroupCollection(tp=tp)
    with pytest.raises(AttributeError, match="'dp' is asked for, but .* not follow from tp"):
        _ = groups.dp_cp
    groups.dp = dp
    assert groups.mp is groups.tp_cp is groups.expt_tp is tp
    assert groups.dp_cp is groups.expt_dp is dp
    assert members(groups.pp) == members(groups.embd) == [9]
    assert groups.pp is groups.cp
    assert groups.world is dist.group.WORLD
    with pytest.raises(AttributeError, match="'tp_dp' is asked for"):
        _ = groups.tp_dp
    with pytest.raises(AttributeError, match="'dp' is set or was read already"):
        groups.dp = tp
    with pytest.raises(ValueError, match="tpx"):
        ProcessGroupCollection(tpx=tp)


@pytest.mark.parametrize("world_of_16", [9], indirect=True)
def test_reading_a_group_creates_none(world_of_16: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tp = HyperCommGrid([16], ["tp"]).create_pg("tp")
    assert tp is not None
    parallel_state.initialize_model_parallel(2)
    own, some = ProcessGroupCollection(tp=tp), ProcessGroupCollection.use_mpu_process_groups(["tp"])
    monkeypatch.setattr(dist, "new_group", None)
    for groups in (own, some):
        assert members(groups.pp) == members(groups.inter_dist_opt) == [9]
    assert members(own.dp) == [9]


def test_a_program_without_torch_distributed_is_alone() -> None:
    assert ProcessGroupCollection().dp_cp.size() == 1
    with pytest.raises(AttributeError, match="dense_grid"):
        _ = ProcessGroupCollection().dense_grid


@pytest.mark.parametrize("world_of_16", [9], indirect=True)
def test_the_installed_groups_are_taken_whole_or_by_name(world_of_16: int) -> None:
    with pytest.raises(AssertionError, match="not initialized"):
        ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.initialize_model_parallel(2)
    whole = ProcessGroupCollection.use_mpu_process_groups()
    assert whole is parallel_state.current()
    some = ProcessGroupCollection.use_mpu_process_groups(["tp", "dp"])
    assert (some.tp, some.dp) == (whole.tp, whole.dp)


def test_a_group_that_may_be_missing_is_asked_for_without_a_check() -> None:
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises((RuntimeError, AssertionError)):
        parallel_state.get_tensor_model_parallel_group()


@pytest.mark.parametrize("world_of_16", [5], indirect=True)
def test_a_group_that_is_there_is_given_with_and_without_a_check(world_of_16: int) -> None:
    parallel_state.initialize_model_parallel(2)
    checked = parallel_state.get_tensor_model_parallel_group()
    assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is checked
    assert members(checked) == [4, 5]
