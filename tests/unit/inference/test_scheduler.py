"""Requests give the same tokens in any company, and every page comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import pytest

from megatron.core.inference.paged_engine.request import (
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
    RequestStatus,
)
from megatron.core.inference.paged_engine.scheduler import EngineLimits, Scheduler
from megatron.core.inference.paged_engine.step_plan import SAMPLE, StepPlan, StepResult
from megatron.core.inference.sampling_params import SamplingParams
from tests.unit.inference.engine_simulation import EOD, VOCABULARY, Model, PoisonedPool, check

LIMITS = EngineLimits(
    page_size=4,
    num_pages=40,
    max_requests=4,
    max_step_tokens=64,
    max_sequence_length=60,
    max_waiting=1000,
)
UNLIMITED = 100_000
_NO_DEPTH = repeat(0)


@dataclass
class Lanes:
    """Schedulers that share a pool and a model."""

    limits: EngineLimits = LIMITS
    num_lanes: int = 1
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pool = PoisonedPool(self.limits.num_pages, self.limits.page_size)
        self.model = Model(self.pool)
        share = self.limits.max_requests // self.num_lanes
        self.schedulers = [
            Scheduler(self.limits, self.pool, range(i * share, (i + 1) * share), EOD)
            for i in range(self.num_lanes)
        ]
        self.results: list[list[tuple[StepPlan, StepResult]]] = [[] for _ in self.schedulers]

    def add(self, request: Request, lane: int = 0) -> Request:
        self.schedulers[lane].add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def abort(self, request_id: str) -> bool:
        found = any([s.abort(request_id) for s in self.schedulers])
        self.aborted |= {request_id} if found else set()
        return found

    def step(self, lane: int = 0, depth: int = 0) -> StepPlan | None:
        """Record all but ``depth`` plans of the lane in flight, then plan and execute its next."""
        self.finish(lane, depth)
        self.model.poison()
        plan = self.schedulers[lane].plan()
        if plan is not None:
            assert plan.num_rows <= self.limits.max_step_tokens
            self.results[lane].append((plan, self.model.execute(plan)))
        return plan

    def finish(self, lane: int = 0, depth: int = 0) -> None:
        while len(self.results[lane]) > depth:
            for output in self.schedulers[lane].record(*self.results[lane].pop(0)):
                self.outputs[output.request_id].append(output)

    def run(self, depths: Iterator[int] = _NO_DEPTH) -> None:
        """Step until all requests have ended; check them and the pages."""
        num_idle = 0
        while any(s.has_unfinished for s in self.schedulers):
            plans = [self.step(lane, next(depths)) for lane in range(self.num_lanes)]
            is_idle = not any(plans) and not any(self.results)
            num_idle = num_idle + 1 if is_idle else 0  # a lane may wait for pages of the next one
            assert num_idle < 2, "no request advances"
        self.check()

    def check(self) -> None:
        assert not any(s.has_unfinished for s in self.schedulers)
        assert self.pool.num_free == self.pool.num_pages
        longest = self.limits.max_sequence_length
        for key, request in self.requests.items():
            check(request, self.outputs[key], longest, key not in self.aborted)
            assert request.status is RequestStatus.FINISHED
            assert request.slot is None


def _request(name: str, length: int, rng: random.Random | None = None, **params: object) -> Request:
    rng = rng or random.Random(name)
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(length)]
    values = {"seed": 3, "num_tokens_to_generate": 10, "ignore_eos": True, **params}
    return Request(name, prompt, SamplingParams(**values))  # type: ignore[arg-type]


def _random_request(name: str, rng: random.Random) -> Request:
    length = rng.choice([1, 2, 3, 4, 5, 8, 11, 12, 13, 30, 47])
    kind = rng.randrange(8)
    request = _request(
        name,
        length,
        rng,
        seed=rng.choice([1, 2, rng.randrange(1000)]),
        num_tokens_to_generate=rng.choice([0, 1, 2, 5, 12, 40]),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 3, 9]),
        stop_token_ids=(5,) if rng.random() < 0.2 else (),
        return_prompt_log_probs=kind == 0,
        prompt_log_probs_only=kind == 1,
        top_n_logprobs=rng.choice([0, 2]),
        return_prompt_top_n_logprobs=rng.random() < 0.5,
        repetition_penalty=1.5 if kind == 2 else 1.0,
    )
    if rng.random() < 0.6:  # the same start as other prompts
        common = [1 + i % (VOCABULARY - 1) for i in range(rng.choice([4, 8, 9, 16, 24]))]
        request.prompt = (common + request.prompt)[:50]
    if rng.random() < 0.15:
        request.source = [rng.randrange(3)]
    return request


def _random_work(lanes: Lanes, rng: random.Random, number: int) -> None:
    """Add and abort requests at random while lanes are at random points of their steps."""
    depths = iter(lambda: rng.choice([0, 0, 1, 2]), -1)
    for i in range(number):
        lanes.add(_random_request(f"r{i}", rng), rng.randrange(lanes.num_lanes))
        for _ in range(rng.choice([0, 0, 1, 2, 8])):
            lanes.step(rng.randrange(lanes.num_lanes), next(depths))
        if rng.random() < 0.15:
            lanes.abort(f"r{rng.randrange(i + 1)}")
    lanes.run(depths)


@pytest.mark.parametrize("budget", [1, 7, 16, 64, UNLIMITED])
@pytest.mark.parametrize("num_pages", [15, 24, 200])
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_random_work_gives_the_tokens_of_each_request_alone(
    budget: int, num_pages: int, num_lanes: int
) -> None:
    limits = replace(LIMITS, max_step_tokens=budget, num_pages=num_pages, max_requests=9)
    for seed in range(3):
        rng = random.Random(f"{budget} {num_pages} {num_lanes} {seed}")
        lanes = Lanes(replace(limits, has_prefix_cache=seed > 0), num_lanes)
        _random_work(lanes, rng, 40)
        if num_pages == 15 and budget > 1:
            assert sum(s.num_preemptions for s in lanes.schedulers) > 0


def test_decode_rows_come_before_prompts() -> None:
    lanes = Lanes(replace(LIMITS, max_step_tokens=6))
    lanes.add(_request("a", 3))
    lanes.step()
    lanes.add(_request("b", 20))
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
    lanes.add(_request("a", 30))
    lanes.add(_request("large", 30))
    lanes.add(_request("small", 1))
    plan = lanes.step()
    assert plan is not None
    assert [s.slot for s in plan.segments] == [0]
    assert lanes.schedulers[0].num_waiting == 2
    lanes.run()


def test_the_newest_request_is_pre_empted_and_computes_its_tokens_again() -> None:
    lanes = Lanes(replace(LIMITS, num_pages=6, has_prefix_cache=False))
    old = lanes.add(_request("old", 8, num_tokens_to_generate=9))
    new = lanes.add(_request("new", 11, num_tokens_to_generate=9, repetition_penalty=1.2))
    lanes.step()
    assert (old.status, new.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)
    lanes.step()
    lanes.step()
    assert (new.status, new.slot, new.num_cached) == (RequestStatus.WAITING, None, 0)
    output = list(new.output)
    assert len(output) == 2
    while old.status is not RequestStatus.FINISHED:
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
    first = lanes.add(_request("a", 16, random.Random(1)))
    lanes.run()
    lanes.add(_request("b", 16, random.Random(1)))
    longer = _request("c", 3)
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
    lanes.add(_request("a", 16, random.Random(1)))
    lanes.run()
    request = _request("b", 16, random.Random(1), return_prompt_log_probs=change == "scores")
    if change == "weights":
        lanes.schedulers[0].invalidate(1)
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
    lanes.add(_request("a", 16, random.Random(1)))
    lanes.step()
    lanes.schedulers[0].invalidate(1)
    lanes.run()
    lanes.add(_request("b", 16, random.Random(1)))
    plan = lanes.step()
    assert plan is not None
    assert plan.segments[0].start == 0
    lanes.run()
    assert [o.weight_version for o in lanes.outputs["a"]] == [0] + [1] * 9


def test_a_request_in_flight_can_be_aborted() -> None:
    lanes = Lanes()
    lanes.add(_request("a", 9))
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
    lanes.add(_request("a", 3))
    lanes.step()
    for i in range(500):
        lanes.add(_request(f"w{i}", 3))
        lanes.abort(f"w{i}")
    assert len(lanes.schedulers[0]._waiting) < 100
    lanes.run()


def test_a_request_is_not_planned_twice() -> None:
    lanes = Lanes()
    lanes.add(_request("a", 3))
    lanes.step()
    lanes.add(_request("b", 3))
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
    lanes.add(_request("a", 4))
    request = _request("b", 4)
    change(request)
    with pytest.raises(RequestError) as found:
        lanes.add(request)
    assert str(found.value) == message
    lanes.run()


def test_the_queue_is_bounded() -> None:
    lanes = Lanes(replace(LIMITS, max_waiting=2))
    lanes.add(_request("a", 4))
    lanes.add(_request("b", 4))
    with pytest.raises(QueueFullError, match="2 requests wait, the most that the queue holds"):
        lanes.add(_request("c", 4))
    lanes.run()


def test_generation_stops_at_the_longest_sequence() -> None:
    lanes = Lanes(replace(LIMITS, max_sequence_length=12))
    lanes.add(_request("a", 9, num_tokens_to_generate=30))
    lanes.add(_request("scored", 12, prompt_log_probs_only=True))
    lanes.run()
    assert lanes.requests["a"].output == [t.token for o in lanes.outputs["a"] for t in o.new]
    assert len(lanes.requests["a"].output) == 3
    assert len(lanes.outputs["scored"][0].prompt_scores) == 11


def test_a_seed_is_drawn_once_when_none_is_given() -> None:
    lanes = Lanes()
    lanes.add(_request("a", 3, seed=None))
    lanes.add(_request("b", 3, seed=None))
    plan = lanes.step()
    assert plan is not None
    seeds = [a.params["seed"] for a in plan.admissions]
    assert all(isinstance(s, int) and 0 <= s < 2**63 for s in seeds)
    assert seeds[0] != seeds[1]


def test_an_admission_names_every_token_that_ends_the_text() -> None:
    lanes = Lanes()
    lanes.add(_request("a", 3, ignore_eos=False, stop_token_ids=(7, 4), logit_bias={3: 1.0}))
    lanes.add(_request("b", 3, stop_token_ids=(7,), frequency_penalty=0.5))
    plan = lanes.step()
    assert plan is not None
    first, second = plan.admissions
    assert (first.params["stop_token_ids"], second.params["stop_token_ids"]) == ([0, 4, 7], [7])
    assert first.params["logit_bias"] == {"3": 1.0}
    assert (first.history, second.history) == ((), tuple(lanes.requests["b"].prompt))


def test_page_arrays_and_tokens_of_a_plan_are_views() -> None:
    lanes = Lanes()
    lanes.add(_request("a", 30))
    plan = lanes.step()
    assert plan is not None
    assert not plan.segments[0].pages.flags.owndata
    assert not plan.segments[0].tokens.flags.owndata
    assert plan.segments[0].pages.dtype == np.int64
