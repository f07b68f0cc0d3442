"""Samples of one prompt share its pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.inference.paged_engine.request import Request
from tests.support.engine_lanes import LIMITS, Lanes, make_request


def _fork(parent: Request, number: int) -> Request:
    fork = make_request(f"{parent.request_id}-{number}", 1, seed=100 + number)
    fork.prompt = [*parent.prompt]
    fork.fork_of = parent.request_id
    return fork


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 30])
def test_forks_compute_the_last_token_of_the_prompt_only(length: int) -> None:
    lanes = Lanes(replace(LIMITS, has_prefix_cache=False))
    parent = lanes.add(make_request("p", length))
    forks = [lanes.add(_fork(parent, i)) for i in range(3)]
    lanes.step()
    assert lanes.schedulers[0].num_waiting == (0 if length == 1 else 3)
    plan = lanes.step()
    assert plan is not None
    if length > 1:
        assert [(s.start, len(s.tokens)) for s in plan.segments[1:]] == [(length - 1, 1)] * 3
        assert len(plan.copies) == (3 if (length - 1) % 4 else 0)
        shared = [s.pages[: (length - 1) // 4].tolist() for s in plan.segments]
        assert shared == [shared[0]] * 4
    lanes.run()
    assert len({tuple(r.output) for r in (parent, *forks)}) > 1
    cached = [lanes.outputs[f.request_id][0].num_cached_prompt_tokens for f in forks]
    assert cached == [length - 1] * 3


def test_forks_of_a_request_that_generates_already_share_its_prompt() -> None:
    lanes = Lanes(replace(LIMITS, has_prefix_cache=False))
    parent = lanes.add(make_request("p", 10))
    for _ in range(4):
        lanes.step()
    lanes.add(_fork(parent, 0))
    plan = lanes.step()
    assert plan is not None
    assert [(s.start, len(s.tokens)) for s in plan.segments] == [(13, 1), (9, 1)]
    assert plan.copies == [(plan.segments[0].pages[2], plan.segments[1].pages[2])]
    lanes.run()


def test_forks_whose_first_request_is_aborted_compute_the_prompt() -> None:
    lanes = Lanes(replace(LIMITS, max_step_tokens=6))
    parent = lanes.add(make_request("p", 20))
    forks = [_fork(parent, i) for i in range(3)]
    for fork in forks:
        lanes.add(fork)
    lanes.step()
    lanes.abort(forks[1].request_id)
    assert lanes.schedulers[0].num_waiting == 2
    lanes.abort("p")
    plan = lanes.step()
    assert plan is not None
    lanes.run()


def test_recurrent_layers_share_nothing() -> None:
    lanes = Lanes(replace(LIMITS, has_recurrent_layers=True))
    parent = lanes.add(make_request("p", 10))
    lanes.add(_fork(parent, 0))
    plan = lanes.step()
    assert plan is not None
    assert [s.start for s in plan.segments] == [0, 0]
    lanes.add(_fork(parent, 1))
    plan = lanes.step()
    assert plan is not None
    assert (plan.segments[2].start, plan.copies) == (0, [])
    lanes.run()


def test_pages_of_older_weights_are_not_kept_by_forks() -> None:
    lanes = Lanes()
    parent = lanes.add(make_request("p", 12))
    lanes.step()
    lanes.finish()
    lanes.pool.invalidate(1)
    lanes.add(_fork(parent, 0))
    plan = lanes.step()
    assert plan is not None
    assert plan.segments[1].start == 11
    lanes.run()
    assert not lanes.pool._digest_of


def test_forks_wait_until_all_parts_of_the_prompt_are_computed() -> None:
    lanes = Lanes(replace(LIMITS, max_step_tokens=16))
    parent = lanes.add(make_request("p", 20))
    lanes.add(_fork(parent, 0))
    rows = []
    for _ in range(3):
        plan = lanes.step()
        assert plan is not None
        rows.append([(s.start, len(s.tokens)) for s in plan.segments])
    assert rows == [[(0, 16)], [(16, 4)], [(20, 1), (19, 1)]]
    lanes.run()
