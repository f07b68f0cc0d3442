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
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from operator import attrgetter

import numpy as np

from megatron.core.inference.paged_engine.beam import BeamGroup
from megatron.core.inference.paged_engine.options import EngineLimits
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
    check_beam,
    check_grammar,
    generation_length,
)
from megatron.core.inference.paged_engine.request_state import RequestState, Speculation
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    NO_TOKEN,
    SAMPLE,
    Segment,
    StepOutput,
    StepPlan,
)


@dataclass
class PlannedStep:
    """A plan, the states of its segments, and the version of the weights that execute it.

    ``room``: rows that the plan may still get.
    """

    room: int
    weight_version: int
    plan: StepPlan = field(default_factory=StepPlan)
    states: list[RequestState] = field(default_factory=list)


class RequestScheduler:
    """Requests of one lane.  Lanes share ``pool``; this one owns ``slots``."""

    def __init__(
        self,
        limits: EngineLimits,
        pool: PagePool,
        slots: range,
        eod: int | None,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.eod = eod
        self.num_preemptions = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.admits = True  # False: requests that have not run yet wait
        self._seeds = random.SystemRandom()
        self._slots = list(reversed(slots))
        self._states: dict[str, RequestState] = {}  # waiting and running
        self._groups: dict[str, BeamGroup] = {}
        self._queue = WaitingQueue()
        self._num_children = 0  # requests that wait for the prompt of another one
        self._running: list[RequestState] = []  # by order
        self._num_added = 0
        self._in_flight: dict[int, PlannedStep] = {}  # by id of the plan

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
        check_beam(request)
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
        if self._drafts(request):
            text = None if self.limits.num_draft_layers else request.prompt
            state.speculation = Speculation(self.limits.num_draft_tokens, text)
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
        step = PlannedStep(self.limits.max_step_tokens, self.pool.weight_version)
        self._pre_empt_long()
        self._add_running(step)
        self._start_waiting(step)
        while not step.states and self._queue and not self._in_flight:
            held = next((s for s in reversed(self._running) if s.is_held), None)
            if held is None:
                break
            self._pre_empt(held)  # the beams that it waits for need its slot or pages
            self._start_waiting(step)
        if not step.states:
            return None
        self._in_flight[id(step.plan)] = step
        return step.plan

    def record(self, plan: StepPlan, output: StepOutput) -> list[RequestOutput]:
        """Record the output of a plan; return the outputs of its requests."""
        step = self._in_flight.pop(id(plan))
        rows = OutputRows(output, step.weight_version)
        outputs = []
        for state, segment in zip(step.states, plan.segments, strict=True):
            state.is_in_flight = False
            if state.is_ended:
                self._free(state)
            elif (found := self._record_rows(state, segment, rows)) is not None:
                outputs.append(found)
            rows.at += len(segment.targets)
            rows.segment += 1
        return outputs

    def pre_empt_all(self) -> None:
        """Pre-empt all running requests, which go on with keys of new weights; none in flight."""
        for state in list(self._running):
            assert not state.is_in_flight, "its keys are still being computed"
            state.num_scored -= len(state.scores)  # they have not been reported yet
            state.scores = []
            self._pre_empt(state)

    def _check(self, request: Request, parent: RequestState | None) -> None:
        """Raise QueueFullError, or RequestError if the request does not agree with others."""
        if request.request_id in self._states:
            raise RequestError(
                f"request_id {request.request_id!r} is in use: give each request its own",
                "request_id",
            )
        own = request.prompt, request.source
        if parent is not None and own != (parent.request.prompt, parent.request.source):
            raise RequestError(
                f"the prompt of fork_of {request.fork_of!r} is another one: give the same prompt",
                "fork_of",
            )
        if self.num_waiting >= self.limits.max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait, the most that the queue holds: try again later"
            )

    def _drafts(self, request: Request) -> bool:
        """Return whether a request has drafts: its samples depend on nothing but the tokens."""
        limits = self.limits
        if not limits.num_draft_tokens or limits.has_recurrent_layers:
            return False
        # Earlier text repeats the ids of images.
        params = request.params
        return not (params.has_penalty or request.matcher or request.beam or request.images)

    def _add_running(self, step: PlannedStep) -> None:
        """Add a row of each request that generates, with drafts, then parts of prompts."""
        ready = [s for s in self._running if not (s.is_in_flight or s.is_held) and s.has_mask]
        num_spare = step.room - sum(s.num_remaining for s in ready)  # for drafts
        for state in sorted(ready, key=lambda s: s.num_remaining > 1):
            if not step.room or state.request.slot is None:  # pre-empted for a page of another one
                continue
            count = min(state.num_remaining, step.room)
            drafts = state.draft(num_spare, self.pool) if state.num_remaining == 1 else ()
            num_spare -= self._add_rows(step, state, count, drafts)

    def _start_waiting(self, step: PlannedStep) -> None:
        """Start requests in the order of their arrival, as long as slots, pages and rows last."""
        while step.room and self._slots and self._queue:
            state = self._queue.first()
            may_start = (self.admits or state.has_begun) and state.has_mask
            if not may_start or not self._start(step, state):
                break
            self._add_rows(step, state, min(state.num_remaining, step.room))

    def _start(self, step: PlannedStep, state: RequestState) -> bool:
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
            step.plan.copies.append((pages[num_full], more[0]))
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
        step.plan.admissions.append(state.admission())
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
        self, step: PlannedStep, state: RequestState, count: int, drafts: Sequence[int] = ()
    ) -> int:
        """Add the next rows of a running request and drafts; return the number of drafts added.

        The rows may need a page, for which requests are pre-empted; for drafts none is.  Drafts of
        MTP layers beyond their number take entries behind the rows.
        """
        request = state.request
        start = request.num_cached
        end = start + count
        num_pages = self.pool.pages_for(end)
        if num_pages > state.pages.size and not self._add_page(state):
            return 0
        assert request.slot is not None, "a request without a slot does not run"
        num_ahead = self.limits.num_draft_layers
        num_wanted = 0
        if state.speculation is not None:
            if num_ahead and end == state.goal and state.generates:
                num_wanted = state.num_wanted_drafts
            num_behind = max(num_wanted - num_ahead, 0)
            num_more = self.pool.pages_for(end + len(drafts) + num_behind) - state.pages.size
            for page in self.pool.allocate(max(num_more, 0)) or ():
                state.pages.append(page)
            drafts = drafts[: state.pages.size * self.pool.page_size - end]
            num_pages = self.pool.pages_for(end + len(drafts) + num_behind)
        tokens = state.tokens.values[start:end]
        targets = state.targets(end)
        if drafts:
            tokens = np.concatenate([tokens, np.array(drafts, dtype=np.int64)])
            targets = np.full(1 + len(drafts), SAMPLE, dtype=np.int64)
        if request.matcher is not None and end == state.goal:
            step.plan.masks[request.slot] = request.matcher.allowed().astype(np.int64)
        pages = state.pages.values[: min(num_pages, state.pages.size)]
        ahead = NO_INTEGERS
        if num_ahead:
            ahead = state.tokens.values[end : min(end + num_ahead, state.tokens.size)]
        step.plan.segments.append(
            Segment(request.slot, start, tokens, pages, targets, ahead, num_wanted)
        )
        step.states.append(state)
        step.room -= len(tokens)
        state.is_in_flight = True
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
        if self.pool.longest_short is None:
            return
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
        self, state: RequestState, segment: Segment, rows: OutputRows
    ) -> RequestOutput | None:
        """Add the rows of one segment to its request; return the request's output, if any."""
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
        self, state: RequestState, rows: OutputRows, first: int, drafts: list[int]
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


class OutputRows:
    """Output rows of a step; ``at``: the first row of the current segment, ``segment``."""

    def __init__(self, output: StepOutput, weight_version: int) -> None:
        self.at = self.segment = 0
        self.weight_version = weight_version
        self._output = output
        self._tokens = output.tokens.tolist()
        self._log_probs = output.log_probs.tolist()

    def drafts(self) -> list[int]:
        """Return the drafts of MTP layers after the tokens of the segment."""
        found = self._output.drafts
        return found[self.segment].tolist() if len(found) else []

    def output(self, row: int, num_top: int) -> TokenOutput:
        """Return row ``row`` of the segment with its ``num_top`` most likely tokens."""
        row += self.at
        top: tuple[tuple[int, float], ...] = ()
        if num_top:
            tokens = self._output.top_tokens[row, :num_top].tolist()
            log_probs = self._output.top_log_probs[row, :num_top].tolist()
            top = tuple(zip(tokens, log_probs, strict=True))
        return TokenOutput(self._tokens[row], self._log_probs[row], top)


class WaitingQueue:
    """A heap by arrival: a pre-empted request is first again.

    A removed request leaves its entry in the heap until that is first, or until such entries are
    most of the heap: `remove` takes constant time on average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], RequestState]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, state: RequestState) -> None:
        """Add a request that is not in the queue and was not removed from it."""
        state.is_queued = True
        heappush(self._heap, (state.order, state))
        self._size += 1

    def first(self) -> RequestState:
        """Return the request that arrived first."""
        while not self._heap[0][1].is_queued:
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> None:
        """Remove the request that `first` has returned."""
        heappop(self._heap)[1].is_queued = False
        self._size -= 1

    def remove(self, state: RequestState) -> None:
        """Remove a request for good, wherever it is in the queue."""
        state.is_queued = False
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if entry[1].is_queued]
            heapify(self._heap)
