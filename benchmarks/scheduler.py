"""Measure the host work of a generation step: plan, array for other ranks, view of layers, record.

    python -m benchmarks.scheduler [--requests 1 16 256] [--top 0] [--drafts 0]

No model runs: results are synthetic.  Times are CPU time in microseconds, medians of all steps but
the first two.  All requests have prompts of 512 tokens and generate 600, so that after the first
step each step has one row of each (with --drafts: more, all accepted).  Goal: 150 us + 5 us a
request.  Dated results are in scheduler.md.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from megatron.core.inference.paged_engine.cache import BatchView, PagedCache, SlotPositions
from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.paged_engine.scheduler import EngineLimits, RequestScheduler
from megatron.core.inference.paged_engine.step_plan import StepOutput, StepPlan
from megatron.core.inference.sampling_params import SamplingParams

T = TypeVar("T")
_PAGE_SIZE = 16
_PROMPT = 512
_NEW = 600


def new_scheduler(num_requests: int, top: int, drafts: int) -> RequestScheduler:
    """Return a scheduler with requests of random prompts."""
    limits = EngineLimits(
        page_size=_PAGE_SIZE,
        num_pages=num_requests * (_PROMPT + _NEW) // _PAGE_SIZE + num_requests,
        max_requests=num_requests,
        max_step_tokens=num_requests * _PROMPT,
        max_sequence_length=_PROMPT + _NEW,
        max_waiting=num_requests,
        num_draft_tokens=drafts,
    )
    pool = PagePool(limits.num_pages, _PAGE_SIZE)
    scheduler = RequestScheduler(limits, pool, range(num_requests), 0)
    rng = random.Random(0)
    params = SamplingParams(seed=1, num_tokens_to_generate=_NEW, top_n_logprobs=top)
    for i in range(num_requests):
        prompt = [rng.randrange(1, 50_000) for _ in range(_PROMPT)]
        scheduler.add(Request(str(i), prompt, params))
    return scheduler


def result_of(plan: StepPlan, number: int, top: int, drafts: int) -> StepOutput:
    """Return a result: the same token in each row if drafts are to be accepted."""
    rows = plan.num_outputs
    tokens = np.full(rows, 7) if drafts else np.arange(1, rows + 1) + number % 3
    log_probs = np.zeros((rows, top), dtype=np.float32)
    return StepOutput(
        tokens, np.zeros(rows, dtype=np.float32), np.ones((rows, top), dtype=np.int64), log_probs
    )


def view_of(plan: StepPlan, cache: PagedCache, slots: SlotPositions) -> BatchView:
    """Return what the layers of a model see of a plan."""
    return BatchView(cache, plan, torch.device("cpu"), slots=slots)


def timed(times: list[float], work: Callable[[], T]) -> T:
    """Return the result of ``work`` and append its CPU time in microseconds."""
    start = time.process_time()
    found = work()
    times.append(1e6 * (time.process_time() - start))
    return found


def measure(num_requests: int, top: int, drafts: int) -> str:
    """Return a row of a table: medians over all steps but the first two."""
    scheduler = new_scheduler(num_requests, top, drafts)
    cache = PagedCache(scheduler.limits.num_pages, _PAGE_SIZE, num_requests)
    slots = SlotPositions(num_requests + 1)
    plans: list[float] = []
    arrays: list[float] = []
    views: list[float] = []
    records: list[float] = []
    number = 0
    while (plan := timed(plans, scheduler.plan)) is not None:
        timed(arrays, plan.to_array)
        timed(views, lambda p=plan: view_of(p, cache, slots))  # type: ignore[misc]
        result = result_of(plan, number, top, drafts)
        timed(records, lambda p=plan, r=result: scheduler.record(p, r))  # type: ignore[misc]
        number += 1
    found = [statistics.median(times[2:number]) for times in (plans, arrays, views, records)]
    parts_of = zip(plans[2:number], arrays[2:], views[2:], records[2:], strict=True)
    sums = sorted(map(sum, parts_of))
    parts = " | ".join(
        f"{t:.0f}" for t in (*found, sums[len(sums) // 2], sums[len(sums) * 99 // 100])
    )
    return f"| {num_requests} | {top} | {drafts} | {number} | {parts} | {150 + 5 * num_requests} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--top", type=int, default=0, help="likely tokens to report with each")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens of a step")
    args = parser.parse_args()
    parts = "plan | to_array | view | record | sum | p99 of sum"
    print(f"| requests | top | drafts | steps | {parts} | goal |")
    print("|---" * 11 + "|")
    for num_requests in args.requests:
        print(measure(num_requests, args.top, args.drafts))


if __name__ == "__main__":
    main()
