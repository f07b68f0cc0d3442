"""Requests give the same tokens in any company, and every page comes back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron.core.inference.paged_engine.request import QueueFullError, Request, RequestError
from megatron.core.inference.paged_engine.step_plan import NO_TOKEN, SAMPLE
from tests.support import selection
from tests.support.engine_lanes import LIMITS, UNLIMITED, Lanes, make_request, random_work

# Tokens of a step, pages and lanes.
LOADS = list(itertools.product([1, 7, 16, 64, UNLIMITED], [15, 24, 200], [1, 3]))


@pytest.mark.parametrize(("budget", "num_pages", "num_lanes"), selection.only(LOADS[::2], LOADS))
def test_random_work_gives_the_tokens_of_each_request_alone(
    budget: int, num_pages: int, num_lanes: int
) -> None:
    limits = replace(LIMITS, max_step_tokens=budget, num_pages=num_pages, max_requests=9)
    num_preemptions = 0
    for seed in range(3):
        rng = random.Random(f"{budget} {num_pages} {num_lanes} {seed}")
        limits = replace(
            limits,
            has_prefix_cache=seed > 0,
            num_draft_tokens=[2, 0, 5][seed],
            num_reserved_pages=[0, 4, 0][seed],
        )
        lanes = Lanes(limits, num_lanes)
        random_work(lanes, rng, 40)
        num_preemptions += sum(s.num_preemptions for s in lanes.schedulers)
    assert num_preemptions > 0 or num_pages > 15 or budget == 1


def test_decode_rows_come_before_prompts() -> None:
    lanes = Lanes(replace(LIMITS, max_step_tokens=6))
    lanes.add(make_request("a", 3))
    lanes.step()
    lanes.add(make_request("b", 20))
    for start in (0, 5, 10):
        plan = lanes.step()
        assert plan is not None
        assert [(s.start, len(s.tokens)) for s in plan.segments] == [
            (3 + start // 5, 1),
            (start, 5),
        ]
        assert [s.targets.tolist() for s in plan.segments] == [[SAMPLE], []]
    lanes.run()


def test_requests_start_in_the_order_of_their_arrival() -> None:
    lanes = Lanes(replace(LIMITS, num_pages=12))
    lanes.add(make_request("a", 30))
    lanes.add(make_request("large", 30))
    lanes.add(make_request("small", 1))
    plan = lanes.step()
    assert plan is not None
    assert [s.slot for s in plan.segments] == [0]
    assert lanes.schedulers[0].num_waiting == 2
    lanes.run()


def test_the_newest_request_is_pre_empted_and_computes_its_tokens_again() -> None:
    lanes = Lanes(replace(LIMITS, num_pages=6, has_prefix_cache=False))
    old = lanes.add(make_request("old", 8, num_tokens_to_generate=9))
    new = lanes.add(make_request("new", 11, num_tokens_to_generate=9, repetition_penalty=1.2))
    lanes.step()
    scheduler = lanes.schedulers[0]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)
    lanes.step()
    lanes.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    output = list(new.output)
    assert len(output) == 2
    while len(old.output) < 9:
        plan = lanes.step()
    assert plan is not None
    assert [(a.history, a.num_prompt) for a in plan.admissions] == [
        (tuple(new.prompt + output), 11)
    ]
    assert [(s.start, len(s.tokens)) for s in plan.segments] == [(0, 13)]
    lanes.run()
    assert lanes.schedulers[0].num_preemptions == 1


def test_a_prefix_hit_computes_the_rest_only_and_at_least_one_token() -> None:
    lanes = Lanes()
    first = lanes.add(make_request("a", 16, random.Random(1)))
    lanes.run()
    lanes.add(make_request("b", 16, random.Random(1)))
    longer = make_request("c", 3)
    longer.prompt = first.prompt + first.output[:6] + longer.prompt
    lanes.add(longer)
    plan = lanes.step()
    assert plan is not None
    assert [(s.start, len(s.tokens)) for s in plan.segments] == [(12, 4), (20, 5)]
    lanes.run()
    assert lanes.outputs["b"][0].num_cached_prompt_tokens == 12
    assert lanes.outputs["c"][0].num_cached_prompt_tokens == 20


@pytest.mark.parametrize("change", ["weights", "source", "token", "scores"])
def test_pages_of_other_content_or_with_wanted_scores_are_not_reused(change: str) -> None:
    lanes = Lanes()
    lanes.add(make_request("a", 16, random.Random(1)))
    lanes.run()
    request = make_request("b", 16, random.Random(1), return_prompt_log_probs=change == "scores")
    if change == "weights":
        lanes.pool.invalidate(1)
    request.source = [1] if change == "source" else []
    request.prompt[0] += change == "token"
    lanes.add(request)
    plan = lanes.step()
    assert plan is not None
    assert plan.segments[0].start == 0
    lanes.run()
    assert lanes.outputs["b"][0].weight_version == (change == "weights")


def test_pages_that_older_weights_computed_are_not_kept() -> None:
    lanes = Lanes()
    lanes.add(make_request("a", 16, random.Random(1)))
    lanes.step()
    lanes.pool.invalidate(1)
    lanes.run()
    lanes.add(make_request("b", 16, random.Random(1)))
    plan = lanes.step()
    assert plan is not None
    assert plan.segments[0].start == 0
    lanes.run()
    assert [o.weight_version for o in lanes.outputs["a"]] == [0] + [1] * 9


def test_a_request_in_flight_can_be_aborted() -> None:
    lanes = Lanes()
    lanes.add(make_request("a", 9))
    lanes.step()
    assert lanes.abort("a")
    assert not lanes.abort("a")
    assert not lanes.abort("b")
    assert lanes.pool.num_free < lanes.pool.num_pages
    lanes.finish()
    assert lanes.outputs["a"] == []
    lanes.check()


def test_aborted_requests_leave_the_queue() -> None:
    lanes = Lanes(replace(LIMITS, max_requests=1, max_waiting=3))
    lanes.add(make_request("a", 3))
    lanes.step()
    for i in range(9):
        lanes.add(make_request(f"w{i}", 3))
        lanes.abort(f"w{i}")
    assert lanes.schedulers[0].num_waiting == 0
    lanes.run()


def test_a_request_is_not_planned_twice() -> None:
    lanes = Lanes()
    lanes.add(make_request("a", 3))
    lanes.step()
    lanes.add(make_request("b", 3))
    plan = lanes.schedulers[0].plan()
    assert plan is not None
    assert [s.slot for s in plan.segments] == [1]
    assert lanes.schedulers[0].plan() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.prompt.clear(), "prompt has no tokens: give at least one"),
        (
            lambda r: r.prompt.extend([1] * 60),
            "prompt has 64 tokens, but at most 59 fit into a sequence of 60: shorten it or raise "
            "--inference-max-seq-length",
        ),
        (
            lambda r: r.params.add_attributes({"num_tokens_to_generate": 54}),
            "prompt of 4 tokens and 54 to generate need 15 pages of 4 tokens, but the cache has "
            "14: ask for fewer tokens or raise --inference-dynamic-batching-buffer-size-gb",
        ),
        (
            lambda r: setattr(r, "request_id", "a"),
            "request_id 'a' is in use: give each request its own",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused(
    change: Callable[[Request], None], message: str
) -> None:
    lanes = Lanes(replace(LIMITS, num_pages=14))
    lanes.add(make_request("a", 4))
    request = make_request("b", 4)
    change(request)
    with pytest.raises(RequestError) as found:
        lanes.add(request)
    assert str(found.value) == message
    lanes.run()


def test_the_queue_is_bounded() -> None:
    lanes = Lanes(replace(LIMITS, max_waiting=2))
    lanes.add(make_request("a", 4))
    lanes.add(make_request("b", 4))
    with pytest.raises(QueueFullError, match="2 requests wait, the most that the queue holds"):
        lanes.add(make_request("c", 4))
    lanes.run()


def test_generation_stops_at_the_longest_sequence() -> None:
    lanes = Lanes(replace(LIMITS, max_sequence_length=12))
    lanes.add(make_request("a", 9, num_tokens_to_generate=30))
    lanes.add(make_request("scored", 12, prompt_log_probs_only=True))
    lanes.run()
    assert lanes.requests["a"].output == [t.token for o in lanes.outputs["a"] for t in o.new]
    assert len(lanes.requests["a"].output) == 3
    assert len(lanes.outputs["scored"][0].prompt_scores) == 11


def test_a_seed_is_drawn_once_when_none_is_given() -> None:
    lanes = Lanes()
    lanes.add(make_request("a", 3, seed=None))
    lanes.add(make_request("b", 3, seed=None))
    plan = lanes.step()
    assert plan is not None
    seeds = [a.params["seed"] for a in plan.admissions]
    assert all(isinstance(s, int) and 0 <= s < 2**63 for s in seeds)
    assert seeds[0] != seeds[1]


def test_an_admission_names_every_token_that_ends_the_text() -> None:
    lanes = Lanes()
    lanes.add(make_request("a", 3, ignore_eos=False, stop_token_ids=(7, 4), logit_bias={3: 1.0}))
    lanes.add(make_request("b", 3, stop_token_ids=(7,), frequency_penalty=0.5))
    plan = lanes.step()
    assert plan is not None
    first, second = plan.admissions
    assert (first.params["stop_token_ids"], second.params["stop_token_ids"]) == ([0, 4, 7], [7])
    assert first.params["logit_bias"] == {"3": 1.0}
    assert (first.history, second.history) == ((), tuple(lanes.requests["b"].prompt))


def test_page_arrays_and_tokens_of_a_plan_are_views() -> None:
    lanes = Lanes()
    lanes.add(make_request("a", 30))
    plan = lanes.step()
    assert plan is not None
    assert not plan.segments[0].pages.flags.owndata
    assert not plan.segments[0].tokens.flags.owndata
    assert plan.segments[0].pages.dtype == np.int64


def test_a_row_without_a_token_ends_its_request_with_an_error() -> None:
    lanes = Lanes()
    request = lanes.add(make_request("a", 6))
    lanes.step()
    lanes.step()
    plan, result = lanes.results[0].pop()
    result.tokens[:] = NO_TOKEN
    (output,) = lanes.schedulers[0].record(plan, result)
    assert (output.new, output.finish_reason) == ((), "error")
    assert output.error == "the model gave no finite logits, or none of a token that is allowed"
    assert len(request.output) == 1
    assert lanes.pool.num_free == lanes.pool.num_pages
    assert not lanes.schedulers[0].has_unfinished
