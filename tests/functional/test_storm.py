"""A small part of the storm; `python -m tests.support.storm` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import selection
from tests.support.storm import Plan, Storm, draw


def plans(last: int) -> tuple[Plan, ...]:
    """Plans of runs whose last rank is ``last``."""
    return (
        Plan(0, "NaN on a rank", last, 5, ((11, "kill launcher 0 (store)"),)),
        Plan(1, "stopped process", last, 5, ((11, "kill rank"), (17, "SIGUSR1 to a launcher"))),
        Plan(2, "NaN always", 1, 4, ()),
    )


@pytest.mark.feature(
    "Fault tolerance: runs on two nodes end with the numbers of an undisturbed one"
)
@pytest.mark.parametrize(
    ("ranks", "number"),
    selection.only([(1, 1)], [(ranks, number) for ranks in (1, 2) for number in range(3)]),
)
def test_a_run_in_a_storm_ends_with_the_numbers_of_the_undisturbed_one(
    tmp_path: Path, ranks: int, number: int
) -> None:
    """With ``ranks`` of each node and one of the plans."""
    plan = plans(2 * ranks - 1)[number]
    storm = Storm(tmp_path, ranks, forks=not any("kill launcher" in f for f in plan.faults))
    storm.strike(plan)
    assert not storm.wrong, "\n".join(storm.wrong)


def test_a_seed_always_gives_the_same_plan() -> None:
    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(50)}) == 50
