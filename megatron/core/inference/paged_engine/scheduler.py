"""Decide which tokens each forward pass of the engine processes: continuous batching.

A step takes one row of each request that generates, oldest request first, then parts of prompts,
up to ``max_step_tokens`` rows.  Requests start in the order of their arrival, each with pages for
all its tokens so far, so that every start leads to at least one new token.  If a request needs a
page and none is free, the newest running one gives its pages and slot back and starts again later
with its output as part of the prompt.  Between `plan` and `record` of a plan its requests are in
flight: they are neither planned again nor pre-empted.
"""

from __future__ import annotations

import base64
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from operator import attrgetter

import numpy as np

from megatron.core.inference.paged_engine.options import EngineLimits
from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import (
    Beam,
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    RequestOutput,
    Routes,
    TokenOutput,
    check_beam,
    check_grammar,
    generation_length,
    place_in_image,
)
from megatron.core.inference.paged_engine.request_state import (
    BeamGroup,
    GrowingInts,
    RequestState,
    Speculation,
)
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    NO_TOKEN,
    NO_VECTOR,
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
        self.num_draft_steps = 0
        self._seeds = random.SystemRandom()
        self._slots = list(reversed(slots))
        self._states: dict[str, RequestState] = {}  # waiting and running
        self._groups: dict[str, BeamGroup] = {}
        self._waiting: list[RequestState] = []  # by order: a pre-empted request is first again
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
        return len(self._waiting) + self._num_children

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._running or self._states)

    @property
    def adapters(self) -> set[int]:
        """Numbers of the adapters of unfinished requests."""
        return {state.request.adapter_number for state in self._states.values()}

    def add(self, request: Request) -> None:
        """Queue a request.

        RequestError: it can never run.  QueueFullError: ``max_waiting`` requests wait already.
        """
        check_beam(request)
        check_grammar(request)
        max_new = generation_length(request, self.limits)
        if request.request_id in self._states:
            raise RequestError(
                f"request_id {request.request_id!r} is in use: give each request its own",
                "request_id",
            )
        if self.num_waiting >= self.limits.max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait, the most that the queue holds: try again later"
            )
        parent = self._states.get(request.fork_of or "")
        seed = request.params.seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        beam = request.beam if max_new else None
        own = request if beam is None else replace(request, output=[])
        state = RequestState(own, (self._num_added, 0), max_new, seed, self.eod)
        # Samples with drafts depend on nothing but the tokens; earlier text repeats ids of images.
        if self.limits.num_draft_tokens and not (
            self.limits.has_recurrent_layers
            or request.params.has_penalty
            or request.matcher
            or request.beam
            or request.images
        ):
            earlier = None if self.limits.num_draft_layers else request.prompt
            state.speculation = Speculation(self.limits.num_draft_tokens, earlier)
        if beam is not None:
            self._groups[request.request_id] = BeamGroup(request, beam, state)
        self._num_added += 1
        self._states[request.request_id] = state
        if parent is not None and not (parent.is_beam or self.limits.has_recurrent_layers):
            state.parent = parent
        if state.parent is None or state.parent.has_prompt:
            self._wait(state)
        else:
            state.parent.children.append(state)
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
        while not step.states and self._waiting and not self._in_flight:
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
        tops: Iterable[tuple[tuple[int, float], ...]] = repeat(())
        if output.top_tokens.size:
            pairs = zip(output.top_tokens.tolist(), output.top_log_probs.tolist(), strict=True)
            tops = (tuple(zip(*pair, strict=True)) for pair in pairs)
        every = map(TokenOutput, output.tokens.tolist(), output.log_probs.tolist(), tops)
        offered: Iterable[list[int]] = output.drafts.tolist() or repeat([])
        vectors = iter(output.vectors)
        routes = iter(output.routes)
        outputs = []
        for state, segment, drafts in zip(step.states, plan.segments, offered, strict=False):
            rows = list(islice(every, len(segment.targets)))
            has_vector = state.request.pooling is not None and len(rows) > 0
            vector = next(vectors) if has_vector else NO_VECTOR
            state.is_in_flight = False
            if self.pool.routes is not None:
                where = self.pool.places(segment.pages, segment.start, segment.num_keys)
                self.pool.routes[where] = [*islice(routes, len(segment.tokens))]
            if state.is_ended:
                self._free(state)
            elif found := self._record_rows(state, segment, rows, drafts, step.weight_version):
                text = base64.b64encode(vector.astype("<f4").tobytes()).decode()
                outputs.append(found._replace(vector=text) if has_vector else found)
        return outputs

    def pre_empt_all(self) -> None:
        """Pre-empt all running requests, which go on with keys of new weights; none in flight."""
        for state in list(self._running):
            assert not state.is_in_flight, "its keys are still being computed"
            state.num_scored -= len(state.scores)  # they have not been reported yet
            state.scores = []
            self._pre_empt(state)

    def _add_running(self, step: PlannedStep) -> None:
        """Add a row of each request that generates, with drafts, then parts of prompts."""
        ready = [s for s in self._running if not (s.is_in_flight or s.is_held) and s.has_mask]
        num_spare = step.room - sum(s.num_remaining for s in ready)  # for drafts
        for state in sorted(ready, key=lambda s: s.num_remaining > 1):
            if not step.room or state.slot is None:  # pre-empted for a page of another one
                continue
            count = self._count_rows(step, state)
            if not count:
                continue
            drafts = state.draft(num_spare, self.pool) if state.num_remaining == 1 else ()
            num_spare -= self._add_rows(step, state, count, drafts)

    def _start_waiting(self, step: PlannedStep) -> None:
        """Start requests in the order of their arrival, as long as slots, pages and rows last."""
        while step.room and self._slots and self._waiting:
            state = self._waiting[0]
            if not (state.has_mask and self._start(step, state)):
                break
            if count := self._count_rows(step, state):
                self._add_rows(step, state, count)

    def _count_rows(self, step: PlannedStep, state: RequestState) -> int:
        """Return how many rows of a request the step takes; 0 if an image must wait for room."""
        count = min(state.num_remaining, step.room)
        end = state.num_cached + count
        if self.limits.keeps_images_whole and count < state.num_remaining:
            place = place_in_image(int(state.tokens.values[end]))
            count = max(count - place, 0)
        return count

    def _start(self, step: PlannedStep, state: RequestState) -> bool:
        """Give the first waiting request pages and a slot; False if too few pages are free."""
        state.choose_frequencies(self.pool)
        pages, num_tokens = self._reusable_pages(state)
        full = pages[: num_tokens // self.pool.page_size]
        num_more = self.pool.pages_for(state.goal) - len(full)
        reserved = self.limits.num_reserved_pages if self._running else 0
        if num_more + self.pool.num_unused(full) + reserved > self.pool.num_free:
            return False
        self.pool.share(full)
        more = self.pool.allocate(num_more)
        assert more is not None, "pages were counted wrongly"
        if len(full) < len(pages):  # this request writes to the rest of that page
            step.plan.copies.append((pages[len(full)], more[0]))
            if self.pool.routes is not None:
                self.pool.routes[more[0]] = self.pool.routes[pages[len(full)]]
        del self._waiting[0]
        state.pages = GrowingInts((*full, *more))
        state.num_cached = num_tokens
        state.slot = self._slots.pop()
        state.num_kept = len(full)
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
        if (
            parent is None
            or parent.is_long != state.is_long
            or parent.num_cached <= len(pages) * size
        ):
            return pages, len(pages) * size
        state.weight_version = parent.weight_version
        num_tokens = min(parent.num_cached, state.num_reusable)
        return parent.pages.view()[: self.pool.pages_for(num_tokens)].tolist(), num_tokens

    def _add_rows(
        self, step: PlannedStep, state: RequestState, count: int, drafts: Sequence[int] = ()
    ) -> int:
        """Add the next rows of a running request and drafts; return the number of drafts added.

        The rows may need a page, for which requests are pre-empted; for drafts none is.  Drafts of
        MTP layers beyond their number take entries behind the rows.
        """
        start = state.num_cached
        end = start + count
        if self.pool.pages_for(end) > state.pages.size and not self._add_page(state):
            return 0
        assert state.slot is not None, "a request without a slot does not run"
        num_ahead = self.limits.num_draft_layers
        samples = end == state.goal and state.generates
        num_wanted = state.num_wanted_drafts if num_ahead and samples else 0
        num_behind = max(num_wanted - num_ahead, 0)
        if state.speculation is not None:
            num_more = self.pool.pages_for(end + len(drafts) + num_behind) - state.pages.size
            for page in self.pool.allocate(max(num_more, 0)) or ():
                state.pages.append(page)
            drafts = drafts[: state.pages.size * self.pool.page_size - end]
        tokens = state.tokens.values[start:end]
        targets = state.targets(end)
        if drafts:
            tokens = np.concatenate([tokens, np.array(drafts, dtype=np.int64)])
            targets = np.full(1 + len(drafts), SAMPLE, dtype=np.int64)
        matcher = state.request.matcher
        if matcher is not None and end == state.goal:
            step.plan.masks[state.slot] = matcher.allowed().astype(np.int64)
        num_pages = self.pool.pages_for(end + len(drafts) + num_behind)
        pages = state.pages.values[: min(num_pages, state.pages.size)]
        ahead = NO_INTEGERS
        if num_ahead:
            ahead = state.tokens.values[end : min(end + num_ahead, state.tokens.size)]
        step.plan.segments.append(
            Segment(state.slot, start, tokens, pages, targets, ahead, num_wanted)
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

    def _wait(self, state: RequestState) -> None:
        insort(self._waiting, state, key=_ORDER)

    def _pre_empt(self, state: RequestState) -> None:
        self._free(state)
        self.num_preemptions += 1
        if not state.is_held:
            self._wait(state)

    def _pre_empt_long(self) -> None:
        """Pre-empt requests that have outgrown the short frequencies of LongRoPE.

        The keys of all their tokens are then computed again with the long ones.
        """
        for state in list(self._running):
            if state.is_long != self.pool.is_long(state.tokens.size) and not state.is_in_flight:
                self._pre_empt(state)

    def _free(self, state: RequestState) -> None:
        """Take the pages and the slot of a running request."""
        assert state.slot is not None, "a request without a slot has no pages"
        self.pool.release(state.pages.view().tolist())
        self._slots.append(state.slot)
        del self._running[bisect_left(self._running, state.order, key=_ORDER)]
        state.pages = GrowingInts()
        state.slot = None
        state.num_cached = 0

    def _end(self, state: RequestState) -> None:
        """End a request, with all its beams."""
        del self._states[state.request.request_id]
        group = self._groups.pop(state.request.request_id, None)
        for part in [state] if group is None else group.states:
            self._drop(part)

    def _drop(self, state: RequestState) -> None:
        """Take a state out of the scheduler, or let `record` do it if it is in flight."""
        state.is_ended = True
        self._release_children(state)
        at = bisect_left(self._waiting, state.order, key=_ORDER)
        if self._waiting[at : at + 1] == [state]:
            del self._waiting[at]
        elif state.slot is not None:
            if not state.is_in_flight:
                self._free(state)
        elif state.parent is not None:
            self._num_children -= 1

    def _release_children(self, state: RequestState) -> None:
        """Queue the requests that have waited for the prompt of this one."""
        for child in state.children:
            if not child.is_ended:
                self._num_children -= 1
                self._wait(child)
        state.children = []

    def _record_rows(
        self,
        state: RequestState,
        segment: Segment,
        rows: list[TokenOutput],
        offered: list[int],
        weight_version: int,
    ) -> RequestOutput | None:
        """Add the rows of one segment to its request; return the request's output, if any.

        ``offered``: drafts of MTP layers.
        """
        num_drafts = max(segment.num_keys - state.goal, 0)
        state.num_cached = segment.num_keys - num_drafts
        is_done = state.num_cached == state.goal
        samples = is_done and state.generates
        num_scores = len(rows) - samples - num_drafts
        if num_scores:
            state.scores += [_with_top(row, state.num_prompt_top) for row in rows[:num_scores]]
            state.num_scored += num_scores
        sampled = [_with_top(row, state.num_top) for row in rows[num_scores:]]
        new: tuple[TokenOutput, ...] = ()
        reason: FinishReason | None = None if state.generates else "length"
        beams: tuple[Beam, ...] = ()
        if state.num_cached // self.pool.page_size > state.num_kept:
            state.keep_full_pages(self.pool)
        if state.children and state.has_prompt:
            self._release_children(state)
        if not is_done:
            return None
        if state.scores and any(score.token == NO_TOKEN for score in state.scores):
            state.scores = []
            reason = "error"
        elif samples and not state.is_beam:
            drafts: list[int] = segment.tokens[-num_drafts:].tolist() if num_drafts else []
            new, reason = self._accept(state, sampled, drafts, offered)
        elif samples and sampled[0].token == NO_TOKEN:
            reason = "error"
        elif samples:
            beams = self._record_beam(state, sampled[0].top)
            if not beams:
                return None
            new = beams[0].tokens
            reason = beams[0].finish_reason
        routes: Routes | None = None
        if reason is not None:
            if self.pool.routes is not None:
                where = self.pool.places(state.pages.view(), 0, state.num_cached)
                routes = self.pool.routes[where]
            self._end(state)
        scores = tuple(state.scores)
        state.scores = []
        error, param = state.why_no_token() if reason == "error" else ("", None)
        return RequestOutput(
            state.request.request_id,
            new,
            scores,
            reason,
            state.num_cached_prompt_tokens or 0,
            weight_version,
            *(error, beams, param),
            routes=routes,
        )

    def _accept(
        self,
        state: RequestState,
        rows: list[TokenOutput],
        drafts: list[int],
        offered: list[int],
    ) -> tuple[tuple[TokenOutput, ...], FinishReason | None]:
        """Add the token of the first row, and those after it while they follow their drafts."""
        new: list[TokenOutput] = []
        for row, draft in zip(rows, [*drafts, None], strict=True):
            if row.token == NO_TOKEN:
                return tuple(new), "error"
            new.append(row)
            reason = state.accept(row.token)
            if reason is not None or row.token != draft:
                break
        if state.speculation is not None:
            state.num_cached = state.goal - 1  # rows of rejected drafts are computed again
            state.speculation.record(len(drafts), [t.token for t in new], offered)
            self.num_drafts += len(drafts)
            self.num_accepted_drafts += len(new) - 1
            self.num_draft_steps += bool(drafts)
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
            if part.slot is None:
                self._wait(part)
        if group.states:
            return ()
        found = group.search.ended
        group.request.output += [t.token for t in found[0].tokens]
        return tuple(found)


_ORDER = attrgetter("order")


def _with_top(row: TokenOutput, num_top: int) -> TokenOutput:
    return row._replace(top=row.top[:num_top]) if len(row.top) > num_top else row
