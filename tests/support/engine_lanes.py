"""Schedulers with a simulated model, and random work for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat

from megatron.core.inference.paged_engine.request import Request, RequestOutput
from megatron.core.inference.paged_engine.scheduler import EngineLimits, RequestScheduler
from megatron.core.inference.paged_engine.step_plan import StepOutput, StepPlan
from megatron.core.inference.sampling_params import SamplingParams
from tests.support.engine_simulation import (
    EOD,
    VOCABULARY,
    CountingMatcher,
    Model,
    PoisonedPool,
    check,
)

LIMITS = EngineLimits(
    page_size=4,
    num_pages=40,
    max_requests=4,
    max_step_tokens=64,
    max_sequence_length=60,
    max_waiting=1000,
)
UNLIMITED = 100_000
NO_DEPTH = repeat(0)


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
            RequestScheduler(self.limits, self.pool, range(i * share, (i + 1) * share), EOD)
            for i in range(self.num_lanes)
        ]
        self.results: list[list[tuple[StepPlan, StepOutput]]] = [[] for _ in self.schedulers]

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
            num_rows = sum(len(s.tokens) for s in plan.segments)
            assert num_rows <= self.limits.max_step_tokens
            self.results[lane].append((plan, self.model.execute(plan)))
        return plan

    def finish(self, lane: int = 0, depth: int = 0) -> None:
        while len(self.results[lane]) > depth:
            for output in self.schedulers[lane].record(*self.results[lane].pop(0)):
                self.outputs[output.request_id].append(output)

    def run(self, depths: Iterator[int] = NO_DEPTH) -> None:
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


def make_request(
    name: str, length: int, rng: random.Random | None = None, **params: object
) -> Request:
    rng = rng or random.Random(name)
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(length)]
    values = {"seed": 3, "num_tokens_to_generate": 10, "ignore_eos": True, **params}
    return Request(name, prompt, SamplingParams(**values))  # type: ignore[arg-type]


def random_request(name: str, rng: random.Random) -> Request:
    length = rng.choice([1, 2, 3, 4, 5, 8, 11, 12, 13, 30, 47])
    kind = rng.randrange(8)
    request = make_request(
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
    if kind == 3:
        request.matcher = CountingMatcher()
        request.params.min_tokens = 0
    if rng.random() < 0.15:
        request.source = [rng.randrange(3)]
    return request


def random_work(lanes: Lanes, rng: random.Random, number: int) -> None:
    """Add and abort requests at random while lanes are at random points of their steps."""
    depths = iter(lambda: rng.choice([0, 0, 1, 2]), -1)
    for i in range(number):
        request = random_request(f"r{i}", rng)
        if i and rng.random() < 0.3:
            first = lanes.requests[f"r{rng.randrange(max(0, i - 8), i)}"]
            request.fork_of = first.request_id
            request.prompt = [*first.prompt]
            request.source = first.source
        lanes.add(request, rng.randrange(lanes.num_lanes))
        for _ in range(rng.choice([0, 0, 1, 2, 8])):
            lanes.step(rng.randrange(lanes.num_lanes), next(depths))
        if rng.random() < 0.15:
            lanes.abort(f"r{rng.randrange(i + 1)}")
    lanes.run(depths)
