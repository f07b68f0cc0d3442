"""Runs whose order of calls hangs on NCCL are found; others end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.host_gpu.nccl_order import Call, Operation, Part, Wait, WrongOrderError, check

GROUPS = {"all": [0, 1], "other": [0, 1], "ranks 0 and 1": [0, 1], "three": [0, 1, 2]}


def collective(number: int, group: str = "all", form: str = "all_reduce") -> Operation:
    return Operation(number, group, form)


def to(number: int, peer: int, group: str = "ranks 0 and 1") -> Operation:
    return Operation(number, group, "", (Part(True, peer, "4"),))


def from_(number: int, peer: int, group: str = "ranks 0 and 1") -> Operation:
    return Operation(number, group, "", (Part(False, peer, "4"),))


def both(number: int, peer: int, group: str = "all") -> Operation:
    return Operation(number, group, "", (Part(True, peer, "4"), Part(False, peer, "4")))


HANGING: dict[str, tuple[str, Sequence[Sequence[Call]]]] = {
    "both ranks send before they receive": (
        "hang",
        [[to(0, 1), Wait(0), from_(1, 1)], [to(0, 0), Wait(0), from_(1, 0)]],
    ),
    "asynchronous sends of both ranks come before their receives": (
        "hang",
        [[to(0, 1), from_(1, 1)], [to(0, 0), from_(1, 0)]],
    ),
    "two groups communicate in different orders": (
        "hang",
        [
            [collective(0), collective(1, "other"), Wait(0), Wait(1), collective(2), Wait(2)]
            + [collective(3, "other"), Wait(3)],
            [collective(0), collective(1, "other"), Wait(0), Wait(1), collective(2, "other")]
            + [Wait(2), collective(3), Wait(3)],
        ],
    ),
    "one of three ranks takes no part in the first batch of a group": (
        "ranks \\[2\\] do not",
        [[both(0, 1, "three"), Wait(0)], [both(0, 0, "three"), Wait(0)], []],
    ),
    "ranks call different collectives": (
        "rank 1 calls broadcast, rank 0 calls all_reduce",
        [[collective(0)], [collective(0, form="broadcast")]],
    ),
    "a rank makes one collective more": ("hang", [[collective(0), collective(1)], [collective(0)]]),
}


@pytest.mark.parametrize("case", HANGING)
def test_calls_that_hang_on_nccl_are_an_error(case: str) -> None:
    message, calls = HANGING[case]
    with pytest.raises(WrongOrderError, match=message):
        check(calls, GROUPS, one_queue=False)


def test_batches_may_send_in_both_directions() -> None:
    first = [collective(9), Wait(9)]
    calls = [[*first, both(0, 1), Wait(0), to(1, 1)], [*first, both(0, 0), Wait(0), from_(1, 0)]]
    check(calls, GROUPS, one_queue=True)


def test_only_with_one_queue_a_blocked_operation_blocks_the_groups_after_it() -> None:
    """Rank 0's second all-reduce waits for its first; with one queue, "other" waits for both."""
    begin: list[Call] = [collective(7), collective(8, "other"), Wait(7), Wait(8)]
    calls = [
        [*begin, collective(0), collective(1), collective(2, "other"), Wait(2)],
        [*begin, collective(2, "other"), Wait(2), collective(0), collective(1)],
    ]
    check(calls, GROUPS, one_queue=False)
    with pytest.raises(WrongOrderError, match="hang"):
        check(calls, GROUPS, one_queue=True)
