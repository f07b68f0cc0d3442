"""Decide which tokens each forward pass of the engine processes: continuous batching.

A step takes one row of each request that generates, oldest request first, then parts of prompts,
up to ``max_step_tokens`` rows.  Requests start in the order of their arrival, each with pages for
all its tokens so far, so that every start leads to at least one new token.  If a request needs a
page and none is free, the newest running one gives its pages and slot back and starts again later
with its output as part of the prompt.  Between `plan` and `record` of a plan its requests are in
flight: they are neither planned again nor pre-empted.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from megatron.core.inference.paged_engine.beam import BeamGroup, check_beam_request
from megatron.core.inference.paged_engine.limits import EngineLimits as EngineLimits
from megatron.core.inference.paged_engine.limits import check_fork, check_grammar, generation_length
from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import (
    Beam,
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
    RequestStatus,
    TokenOutput,
)
from megatron.core.inference.paged_engine.request_state import RequestState
from megatron.core.inference.paged_engine.speculation import (
    MakeDrafter,
    drafter_of,
    new_speculation,
)
from megatron.core.inference.paged_engine.step_plan import (
    NO_TOKEN,
    Segment,
    StepPlan,
    StepResult,
)
from megatron.core.inference.paged_engine.step_rows import ResultRows, StepBuilder, StepInFlight
from megatron.core.inference.paged_engine.waiting_queue import WaitingQueue


class Scheduler:
    """Requests of one lane.  Lanes share ``pool``; this one owns ``slots``."""

    def __init__(
        self,
        limits: EngineLimits,
        pool: PagePool,
        slots: range,
        eod: int | None,
        make_drafter: MakeDrafter | None = None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.eod = eod
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self._make_drafter = make_drafter or drafter_of(limits.num_draft_layers)
        self.admits = True  # False: requests that have not run yet wait
        self._seeds = random.SystemRandom()
        self._slots = list(reversed(slots))
        self._states: dict[str, RequestState] = {}  # waiting and running
        self._groups: dict[str, BeamGroup] = {}
        self._queue = WaitingQueue()
        self._num_children = 0  # requests that wait for the prompt of another one
        self._running: list[RequestState] = []  # by order
        self._num_added = 0
        self._in_flight: dict[int, StepInFlight] = {}  # by id of the plan

    @property
    def num_running(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot, pre-empted ones included."""
        return len(self._queue) + self._num_children

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._running or self._states)

    @property
    def has_started(self) -> bool:
        """Whether a request has begun to run, and has not ended."""
        return bool(self._running) or (bool(self._queue) and self._queue.first().has_begun)

    def add(self, request: Request) -> None:
        """Queue a request.

        RequestError: it can never run.  QueueFullError: ``max_waiting`` requests wait already.
        """
        check_beam_request(request)
        check_grammar(request)
        max_new = generation_length(request, self.limits)
        first = request.fork_of or ""
        parent = None if first in self._groups else self._states.get(first)
        self._check(request, parent)
        seed = request.params.seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        beam = request.beam if max_new else None
        own = request if beam is None else replace(request, output=[])
        state = RequestState(own, (self._num_added, 0), max_new, seed, self.eod)
        max_drafts = 0 if self.limits.has_recurrent_layers else self.limits.num_draft_tokens
        state.speculation = new_speculation(request, max_drafts, self._make_drafter)
        if beam is not None:
            self._groups[request.request_id] = BeamGroup(request, beam, state)
        self._num_added += 1
        self._states[request.request_id] = state
        if parent is None or self.limits.has_recurrent_layers:
            self._queue.push(state)
            return
        state.parent = parent
        if parent.has_prompt:
            self._queue.push(state)
        else:
            parent.children.append(state)
            self._num_children += 1

    def abort(self, request_id: str) -> bool:
        """End a request; return whether it was unfinished.  A result in flight is dropped."""
        state = self._states.get(request_id)
        if state is None:
            return False
        self._end(state)
        return True

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if no request can advance."""
        step = StepBuilder(self.limits.max_step_tokens, self.limits.num_draft_layers)
        if self.pool.longest_short is not None:
            self._pre_empt_long()
        ready = [s for s in self._running if not (s.is_in_flight or s.is_held) and s.has_mask]
        prompts = [s for s in ready if s.num_remaining > 1]
        spare = step.room - len(ready)  # for drafts
        spare -= sum(s.num_remaining - 1 for s in prompts)
        for state in ready:
            if step.room and state.num_remaining == 1 and state.request.slot is not None:
                drafts = state.draft(spare, self.pool) if state.speculation is not None else ()
                spare -= self._add_rows(step, state, 1, drafts)
        for state in prompts:
            if step.room and state.request.slot is not None:
                self._add_rows(step, state, min(state.num_remaining, step.room))
        self._start_waiting(step)
        while not step.segments and self._queue and not self._in_flight:
            held = next((s for s in reversed(self._running) if s.is_held), None)
            if held is None:
                break
            self._pre_empt(held)  # the beams that it waits for need its slot or pages
            self._start_waiting(step)
        if not step.segments:
            return None
        plan = step.plan()
        self._in_flight[id(plan)] = StepInFlight(plan, step.states, self.pool.weight_version)
        return plan

    def record(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take what a plan of `plan` gave; return what it added to its requests."""
        planned = self._in_flight.pop(id(plan))
        rows = ResultRows(result, planned.weight_version)
        outputs = []
        for state, segment in zip(planned.states, plan.segments, strict=True):
            state.is_in_flight = False
            if state.is_ended:
                self._free(state)
            else:
                output = self._record_rows(state, segment, rows)
                if output is not None:
                    outputs.append(output)
            rows.advance(len(segment.targets))
        return outputs

    def invalidate(self, weight_version: int) -> None:
        """Note that the weights have changed: kept pages cannot be used by later requests."""
        self.pool.invalidate(weight_version)

    def pre_empt_all(self) -> None:
        """Pre-empt all running requests, which go on with keys of new weights; none in flight."""
        for state in list(self._running):
            assert not state.is_in_flight, "its keys are still being computed"
            state.forget_scores()
            self._pre_empt(state)

    def _check(self, request: Request, parent: RequestState | None) -> None:
        """Raise QueueFullError, or RequestError if the request does not agree with others."""
        if request.request_id in self._states:
            raise RequestError(
                f"request_id {request.request_id!r} is in use: give each request its own",
                "request_id",
            )
        if parent is not None:
            check_fork(request, parent.request)
        if self.num_waiting >= self.limits.max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait, the most that the queue holds: try again later"
            )

    def _start_waiting(self, step: StepBuilder) -> None:
        """Start requests in the order of their arrival, as long as slots, pages and rows last."""
        while step.room and self._slots and self._queue:
            state = self._queue.first()
            may_start = (self.admits or state.has_begun) and state.has_mask
            if not may_start or not self._start(step, state):
                break
            self._add_rows(step, state, min(state.num_remaining, step.room))

    def _start(self, step: StepBuilder, state: RequestState) -> bool:
        """Give the first waiting request pages and a slot; False if too few pages are free."""
        state.choose_frequencies(self.pool)
        pages, num_tokens = self._reusable_pages(state)
        num_full = num_tokens // self.pool.page_size
        full = pages[:num_full]
        num_more = self.pool.pages_for(state.goal) - num_full
        reserved = self.limits.num_reserved_pages if self._running else 0
        if num_more + self.pool.num_unused(full) + reserved > self.pool.num_free:
            return False
        self.pool.share(full)
        more = self.pool.allocate(num_more)
        assert more is not None, "pages were counted wrongly"
        if num_full < len(pages):  # this request writes to the rest of that page
            step.copies.append((pages[num_full], more[0]))
        for page in (*full, *more):
            state.pages.append(page)
        self._queue.pop()
        request = state.request
        request.num_cached = num_tokens
        request.slot = self._slots.pop()
        request.status = RequestStatus.RUNNING
        state.num_kept = num_full
        state.parent = None
        if state.num_cached_prompt_tokens is None:
            state.num_cached_prompt_tokens = num_tokens
        insort(self._running, state, key=_ORDER)
        step.admit(state)
        return True

    def _reusable_pages(self, state: RequestState) -> tuple[list[int], int]:
        """Return the pages that hold the first tokens of a request already, and their number."""
        if self.limits.has_recurrent_layers:
            return [], 0
        size = self.pool.page_size
        pages = []
        if self.limits.has_prefix_cache:
            num_full = min(state.num_reusable // size, self.pool.num_full(state.tokens.size))
            pages = self.pool.find(state.find_digests(num_full, self.pool))
        parent = state.parent
        has_same = parent is not None and parent.is_long == state.is_long
        if parent is None or not has_same or parent.request.num_cached <= len(pages) * size:
            return pages, len(pages) * size
        state.weight_version = parent.weight_version
        num_tokens = min(parent.request.num_cached, state.num_reusable)
        found: list[int] = parent.pages.values[: self.pool.pages_for(num_tokens)].tolist()
        return found, num_tokens

    def _add_rows(
        self, step: StepBuilder, state: RequestState, count: int, drafts: Sequence[int] = ()
    ) -> int:
        """Add the next rows of a running request and drafts; return the number of drafts added.

        The rows may need a page, for which requests are pre-empted; for drafts none is.  Drafts of
        MTP layers beyond their number take entries behind the rows.
        """
        end = state.request.num_cached + count
        num_pages = self.pool.pages_for(end)
        if num_pages > state.pages.size and not self._add_page(state):
            return 0
        if state.speculation is None:
            step.add(state, count, (), num_pages)
            return 0
        layers = self.limits.num_draft_layers
        samples = end == state.goal and state.generates
        num_wanted = state.num_wanted_drafts if layers and samples else 0
        num_behind = max(num_wanted - layers, 0)
        num_more = self.pool.pages_for(end + len(drafts) + num_behind) - state.pages.size
        for page in self.pool.allocate(max(num_more, 0)) or ():
            state.pages.append(page)
        drafts = drafts[: state.pages.size * self.pool.page_size - end]
        num_pages = self.pool.pages_for(end + len(drafts) + num_behind)
        step.add(state, count, drafts, min(num_pages, state.pages.size), num_wanted)
        return len(drafts)

    def _add_page(self, state: RequestState) -> bool:
        """Add a page to a request; False if the request itself had to be pre-empted for it."""
        while (pages := self.pool.allocate(1)) is None:
            victim = next(s for s in reversed(self._running) if not s.is_in_flight)
            self._pre_empt(victim)
            if victim is state:
                return False
        state.pages.append(pages[0])
        return True

    def _pre_empt(self, state: RequestState) -> None:
        self._free(state)
        state.request.status = RequestStatus.WAITING
        self.num_preemptions += 1
        if not state.is_held:
            self._queue.push(state)

    def _pre_empt_long(self) -> None:
        """Pre-empt requests that have outgrown the short frequencies of LongRoPE.

        The keys of all their tokens are then computed again with the long ones.
        """
        for state in list(self._running):
            if state.is_long != self.pool.is_long(state.tokens.size) and not state.is_in_flight:
                self._pre_empt(state)

    def _free(self, state: RequestState) -> None:
        """Take the pages and the slot of a running request."""
        request = state.request
        assert request.slot is not None, "a request without a slot has no pages"
        self.pool.release(state.pages.to_list())
        self._slots.append(request.slot)
        del self._running[bisect_left(self._running, state.order, key=_ORDER)]
        state.pages.size = 0
        request.slot = None
        request.num_cached = 0

    def _end(self, state: RequestState) -> None:
        """End a request, with all its beams."""
        key = state.request.request_id
        del self._states[key]
        group = self._groups.pop(key, None)
        if group is not None:
            group.request.status = RequestStatus.FINISHED
        for part in [state] if group is None else group.states:
            self._drop(part)

    def _drop(self, state: RequestState) -> None:
        """Take a state out of the scheduler, or let `record` do it if it is in flight."""
        state.is_ended = True
        state.request.status = RequestStatus.FINISHED
        self._release_children(state)
        if state.is_queued:
            self._queue.remove(state)
        elif state.request.slot is not None:
            if not state.is_in_flight:
                self._free(state)
        elif state.parent is not None:
            self._num_children -= 1

    def _release_children(self, state: RequestState) -> None:
        """Queue the requests that have waited for the prompt of this one."""
        for child in state.children:
            if not child.is_ended:
                self._num_children -= 1
                self._queue.push(child)
        state.children = []

    def _record_rows(
        self, state: RequestState, segment: Segment, rows: ResultRows
    ) -> RequestOutput | None:
        """Add the rows of one segment to its request; return what it reports, if anything."""
        request = state.request
        request.num_cached = min(segment.num_keys, state.goal)
        num_drafts = segment.num_keys - request.num_cached
        is_done = request.num_cached == state.goal
        samples = is_done and state.generates
        num_scores = len(segment.targets) - samples - num_drafts
        if num_scores:
            state.scores += [rows.output(i, state.num_prompt_top) for i in range(num_scores)]
            state.num_scored += num_scores
        new: tuple[TokenOutput, ...] = ()
        reason: FinishReason | None = None if state.generates else "length"
        beams: tuple[Beam, ...] = ()
        state.keep_full_pages(self.pool)
        if state.children and state.has_prompt:
            self._release_children(state)
        if is_done and state.scores and any(s.token == NO_TOKEN for s in state.scores):
            state.scores = []
            reason = "error"
        elif samples:
            drafts: list[int] = segment.tokens[-num_drafts:].tolist() if num_drafts else []
            if not state.is_beam:
                new, reason = self._accept(state, rows, num_scores, drafts)
            elif (last := rows.output(num_scores, state.num_top)).token == NO_TOKEN:
                reason = "error"
            elif beams := self._record_beam(state, last.top):
                new, reason = beams[0].tokens, beams[0].finish_reason
            else:
                return None
        if not is_done:
            return None
        if reason is not None:
            self._end(state)
        scores = tuple(state.scores)
        state.scores = []
        error, param = state.why_no_token() if reason == "error" else ("", None)
        return RequestOutput(
            request.request_id,
            new,
            scores,
            reason,
            state.num_cached_prompt_tokens or 0,
            rows.weight_version,
            *(error, beams, param),
        )

    def _accept(
        self, state: RequestState, rows: ResultRows, first: int, drafts: list[int]
    ) -> tuple[tuple[TokenOutput, ...], FinishReason | None]:
        """Add the token of row ``first``, and those after it while they follow their drafts."""
        if state.speculation is None:
            only = rows.output(first, state.num_top)
            return ((), "error") if only.token == NO_TOKEN else ((only,), state.accept(only.token))
        new: list[TokenOutput] = []
        for row in range(first, first + len(drafts) + 1):
            found = rows.output(row, state.num_top)
            if found.token == NO_TOKEN:
                return tuple(new), "error"
            new.append(found)
            reason = state.accept(found.token)
            if reason is not None or len(new) > len(drafts) or found.token != drafts[row - first]:
                break
        state.request.num_cached = state.goal - 1  # rows of rejected drafts are computed again
        state.speculation.record(len(drafts), [t.token for t in new], rows.drafts())
        self.num_drafts += len(drafts)
        self.num_accepted_drafts += len(new) - 1
        return tuple(new), reason

    def _record_beam(
        self, state: RequestState, top: tuple[tuple[int, float], ...]
    ) -> tuple[Beam, ...]:
        """Give a beam its likely tokens; return the texts found if the search has ended."""
        group = self._groups[state.request.request_id]
        if not group.record(state, top):
            return ()
        for dropped in group.advance():
            self._drop(dropped)
        for part in group.states:
            if part.request.slot is None:
                self._queue.push(part)
        if group.states:
            return ()
        found = group.search.results()
        group.request.output += [t.token for t in found[0].tokens]
        return found


_ORDER = attrgetter("order")
