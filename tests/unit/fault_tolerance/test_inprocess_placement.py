"""Which worker is which rank after a fault."""

from __future__ import annotations

import pytest

from megatron.training.fault_tolerance.inprocess.placement import first_placement, next_placement

ONE_NODE = ["a"] * 4
TWO_NODES = ["a", "a", "b", "b"]
THREE_NODES = [*TWO_NODES, "c", "c"]


def test_the_first_workers_are_active() -> None:
    assert first_placement(ONE_NODE, 3, "rank") == [0, 1, 2]
    assert first_placement(THREE_NODES, 4, "node") == [0, 1, 2, 3]
    assert first_placement(ONE_NODE, 4, "node") == [0, 1, 2, 3]


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="5 active ranks are requested and 4 are started"):
        first_placement(ONE_NODE, 5, "rank")
    with pytest.raises(ValueError, match="use --inprocess-granularity rank, or a multiple"):
        first_placement(ONE_NODE, 3, "node")


@pytest.mark.parametrize(
    ("lost", "doubtful", "after"),
    [
        ({1}, (), [0, 3, 2]),
        ({3}, (), [0, 1, 2]),  # the reserve is lost
        ((), {2}, [0, 1, 3]),
        ({0}, {2}, [3, 1, 2]),  # the only reserve replaces the lost worker
        ({0, 3}, (), None),
        ({0, 1}, (), None),
        ({3}, {1}, [0, 1, 2]),
    ],
)
def test_a_reserve_takes_the_place_of_a_rank(
    lost: set[int], doubtful: set[int], after: list[int] | None
) -> None:
    assert next_placement([0, 1, 2], ONE_NODE, lost, doubtful, "rank") == after


def test_a_reserve_of_the_same_node_comes_first() -> None:
    nodes = ["a", "a", "b", "b", "b", "a"]
    assert next_placement([0, 1, 2, 3], nodes, {3}, (), "rank") == [0, 1, 2, 4]
    assert next_placement([0, 1, 2, 3], nodes, {0}, (), "rank") == [5, 1, 2, 3]


def test_a_worker_that_failed_before_is_the_last_reserve() -> None:
    assert next_placement([0, 3, 2], [*ONE_NODE, "a"], {0}, {3}, "rank") == [1, 4, 2]


def test_granularity_node_replaces_complete_nodes() -> None:
    assert next_placement([0, 1, 2, 3], THREE_NODES, {1}, (), "node") == [4, 5, 2, 3]
    assert next_placement([0, 1, 2, 3], THREE_NODES, (), {3}, "node") == [0, 1, 4, 5]
    assert next_placement([0, 1, 2, 3], THREE_NODES, {1, 4}, (), "node") is None
    assert next_placement([0, 1], TWO_NODES, {0, 2}, (), "node") is None
