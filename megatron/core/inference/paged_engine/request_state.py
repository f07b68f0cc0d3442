"""The state of a request that waits or runs, its draft tokens, and its beams.

Position p holds token p of prompt + output.  The row of position p gives the log-probabilities of
token p + 1.  A request is ready to sample when the rows of all its tokens but the last are done.

Beam search finds the texts of the highest score among those that extend the best ones so far.  The
score of a text is the sum of its log-probabilities / length ** length_penalty.  Its length includes
the token that ends it.  Each open beam is a request state; `BeamGroup` forks them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import TypeAlias

import numpy as np

from megatron.core.inference.paged_engine.pages import PagePool
from megatron.core.inference.paged_engine.request import (
    Beam,
    BeamParams,
    FinishReason,
    Request,
    TokenOutput,
    starts_of_images,
    text_of,
)
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    NO_TOKEN,
    SAMPLE_ONLY,
    Admission,
    Integers,
)

_LONGEST, _SHORTEST = 3, 2  # n-grams that are looked up


class NgramLookup:
    """Earlier text of a request: tokens that have followed its last n-gram before are drafts."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, in constant time for each."""
        known = self._tokens
        for token in tokens:
            for n in range(_SHORTEST, min(_LONGEST, len(known)) + 1):
                self._next[tuple(known[-n:])] = len(known)
            known.append(token)

    def draft(self, limit: int) -> list[int]:
        """Return the tokens after the last occurrence of the longest n-gram that was seen before.

        If that is less than ``limit`` tokens ago, the text repeats itself: so does the draft.
        """
        known = self._tokens
        for n in range(_LONGEST, _SHORTEST - 1, -1):
            at = self._next.get(tuple(known[-n:]))
            if at is not None and len(known) >= n:
                period = known[at : at + limit]
                return [period[i % len(period)] for i in range(limit)]
        return []


class Speculation:
    """Draft tokens of one request; a step processes them and samples after each of them.

    The noise of a sample depends on seed, position and token only, so the samples up to the first
    that differs from its draft are the tokens of steps without drafts.

    ``prompt``: earlier text to look drafts up in; None: MTP layers offer them.  The draft length
    adapts to recent acceptance: it doubles, up to ``max_tokens``, after a step that accepted all
    drafts; else it becomes the number of tokens that the step gave.
    """

    def __init__(self, max_tokens: int, prompt: Sequence[int] | None) -> None:
        self._lookup = None if prompt is None else NgramLookup(prompt)
        self._offered: list[int] = []
        self._max_tokens = max_tokens
        self._num_tokens = max_tokens

    def draft(self, limit: int) -> list[int]:
        """Return at most ``limit`` drafts."""
        limit = min(limit, self._num_tokens)
        if limit <= 0:
            return []
        return self._offered[:limit] if self._lookup is None else self._lookup.draft(limit)

    @property
    def num_next(self) -> int:
        """Largest number of drafts that the step after the next one may have."""
        return min(2 * self._num_tokens, self._max_tokens)

    def record(self, num_drafts: int, new: Sequence[int], offered: Sequence[int] = ()) -> None:
        """Append the tokens of a step that had ``num_drafts`` drafts.

        ``offered``: drafts of MTP layers after them, up to the first `NO_TOKEN`.
        """
        if self._lookup is not None:
            self._lookup.extend(new)
        self._offered = list(takewhile(lambda token: token != NO_TOKEN, offered))
        if num_drafts:
            self._num_tokens = self.num_next if len(new) > num_drafts else len(new)


class GrowingInts:
    """Integers that grow at the end; a slice of ``values`` is a view, at no cost of their number.

    Values below ``size`` do not change while a plan that shows them is in flight.
    """

    def __init__(self, values: Iterable[int] = ()) -> None:
        found = np.array([*values], dtype=np.int64)
        self.size = len(found)
        self.values: Integers = np.empty(max(16, 2 * self.size), dtype=np.int64)
        self.values[: self.size] = found

    def append(self, value: int) -> None:
        """Add one value."""
        if self.size == len(self.values):
            self.values = np.concatenate([self.values, np.empty_like(self.values)])
        self.values[self.size] = value
        self.size += 1

    def view(self) -> Integers:
        """Return all values."""
        return self.values[: self.size]


@dataclass(eq=False)
class RequestState:
    """A request with its tokens, pages and digests.

    ``max_new``: the most tokens to generate.  ``goal``: number of tokens to process before the
    request samples or ends.  ``num_kept``: pages at its start that the prefix cache knows.
    ``order``: of arrival; requests of a lower one run first and are pre-empted last.
    ``parent``: a request whose pages hold the start of this one, until this one has started.
    ``is_held``: it waits for other beams, with or without a slot.
    """

    request: Request
    order: tuple[int, int]
    max_new: int
    seed: int
    eod: int | None

    def __post_init__(self) -> None:
        params = self.request.params
        self.tokens = GrowingInts(self.request.prompt)
        self.num_prompt = len(self.request.prompt)
        self.generates = self.max_new > 0
        self.goal = self.num_prompt if self.generates else max(self.num_prompt - 1, 1)
        self.num_cached = 0  # tokens whose keys are in the cache
        self.slot: int | None = None
        wants_scores = params.return_prompt_log_probs or params.prompt_log_probs_only
        # Prompt tokens up to this one have their scores, or none are wanted.
        self.num_scored = 0 if wants_scores else self.num_prompt - 1
        self.scores: list[TokenOutput] = []
        self.num_top = params.top_n_logprobs
        self.num_prompt_top = self.num_top if params.return_prompt_top_n_logprobs else 0
        ignores_eod = params.ignore_eos and self.request.matcher is None
        ends = () if self.eod is None or ignores_eod else (self.eod,)
        self.end_tokens = frozenset((*params.stop_token_ids, *ends))
        self.pages = GrowingInts()
        self.num_kept = 0
        self.digests: list[bytes] = []  # of the first full pages, for the weights of:
        self.weight_version = -1
        self.is_long = False  # whether the keys in its pages have LongRoPE's long frequencies
        self.num_cached_prompt_tokens: int | None = None  # None: it has never run
        self.parent: RequestState | None = None
        self.children: list[RequestState] = []  # those that wait until this one has its prompt
        self.speculation: Speculation | None = None
        self.is_beam = self.request.beam is not None and self.generates
        self.is_held = False
        self.is_in_flight = False
        self.is_ended = False

    @property
    def num_remaining(self) -> int:
        """Number of rows to compute before the next token is sampled or the request ends."""
        return self.goal - self.num_cached

    @property
    def has_mask(self) -> bool:
        """Whether a step can sample the next token without waiting for the grammar."""
        return self.request.matcher is None or self.request.matcher.is_ready()

    @property
    def num_reusable(self) -> int:
        """Number of tokens whose rows need not be computed if their keys are in the cache."""
        if self.request.pooling == "mean":
            return 0
        if self.num_scored < self.num_prompt - 1:
            return min(self.num_scored, self.goal - 1)
        return self.goal - 1

    @property
    def has_prompt(self) -> bool:
        """Whether the pages hold the prompt but its last token, which a fork computes itself."""
        return self.num_cached >= self.num_prompt - 1

    def fork(self, order: tuple[int, int]) -> RequestState:
        """Return a state that continues the same tokens in pages of its own."""
        state = copy(self)
        state.request = replace(self.request, output=[*self.request.output])
        state.order = order
        state.tokens = deepcopy(self.tokens)
        state.digests = [*self.digests]
        state.pages = GrowingInts()
        state.num_kept = 0
        state.num_cached = 0
        state.slot = None
        state.parent = self
        return state

    def admission(self) -> Admission:
        """Return the message to all ranks about the request, which has a slot."""
        assert self.slot is not None, "a request without a slot is not admitted"
        params = self.request.params
        tokens = self.tokens.view()
        own = {
            "seed": self.seed,
            "top_n_logprobs": self.num_top,
            "stop_token_ids": sorted(self.end_tokens),
        }
        return Admission(
            self.slot,
            params.to_json() | own,
            history=tuple(text_of(tokens.tolist())) if params.has_penalty else (),
            num_prompt=self.num_prompt,
            source=tuple(self.request.source),
            start_length=self.tokens.size,
            image_starts=tuple(starts_of_images(tokens)) if self.request.images else (),
            images=self.request.images,
            adapter=self.request.adapter_number,
            pooling=self.request.pooling,
        )

    def targets(self, end: int) -> Integers:
        """Return the targets of the next rows, which end before position ``end``."""
        first = max(self.num_cached, self.num_scored)
        samples = self.generates and end == self.goal
        if first >= min(end, self.num_prompt - 1):
            return SAMPLE_ONLY if samples else NO_INTEGERS
        scored = self.tokens.values[first + 1 : min(end + 1, self.num_prompt)]
        return np.concatenate([scored, SAMPLE_ONLY]) if samples else scored

    def choose_frequencies(self, pool: PagePool) -> None:
        """Note which frequencies of LongRoPE the keys will have; the request holds no pages."""
        is_long = pool.is_long(self.tokens.size)
        if is_long != self.is_long:
            self.is_long = is_long
            self.digests = []

    def draft(self, limit: int, pool: PagePool) -> list[int]:
        """Return at most ``limit`` drafts for the rows after the last token."""
        if pool.longest_short is not None and not self.is_long:
            limit = min(limit, pool.longest_short - self.goal)
        num_new = len(self.request.output)
        if self.speculation is None or num_new < self.request.params.min_tokens:
            return []
        return self.speculation.draft(min(limit, self.max_new - num_new - 1))

    @property
    def num_wanted_drafts(self) -> int:
        """Number of drafts that the step which samples next should give for the one after it."""
        num_new = len(self.request.output) + 1
        if self.speculation is None or num_new < self.request.params.min_tokens:
            return 0
        return max(0, min(self.speculation.num_next, self.max_new - num_new - 1))

    def accept(self, token: int) -> FinishReason | None:
        """Add a generated token; return why the request ends with it, or None."""
        self.tokens.append(token)
        self.goal += 1
        output = self.request.output
        output.append(token)
        if token in self.end_tokens and len(output) > self.request.params.min_tokens:
            return "stop"
        if self.request.matcher is not None:
            self.request.matcher.accept(token)
        return "length" if len(output) >= self.max_new else None

    def why_no_token(self) -> tuple[str, str | None]:
        """Return why no token could be sampled, and the field of the request that is the cause."""
        if self.request.matcher is not None and self.request.matcher.error:
            return self.request.matcher.error, "grammar"
        return "the model gave no finite logits, or none of a token that is allowed", None

    def find_digests(self, count: int, pool: PagePool) -> list[bytes]:
        """Return the digests of the first ``count`` pages, which have all their tokens."""
        if self.weight_version != pool.weight_version:
            self.weight_version = pool.weight_version
            self.digests = []
        for i in range(len(self.digests), count):
            number = self.request.adapter_number
            root = pool.root(self.request.source, is_long=self.is_long, adapter=number)
            previous = self.digests[-1] if i else root + self.request.cache_salt.encode()
            self.digests.append(pool.digest(previous, self.tokens.values, i))
        return self.digests[:count]

    def keep_full_pages(self, pool: PagePool) -> None:
        """Make the pages that have become full findable, unless older weights computed some."""
        count = min(self.num_cached // pool.page_size, pool.num_full(self.tokens.size))
        if count > self.num_kept and self.weight_version == pool.weight_version:
            digests = self.find_digests(count, pool)
            for i in range(self.num_kept, count):
                pool.keep(int(self.pages.values[i]), digests[i])
            self.num_kept = count


class BeamGroup:
    """The open beams of ``request``.  ``root`` is the state that computes its prompt."""

    def __init__(self, request: Request, beam: BeamParams, root: RequestState) -> None:
        self.request = request
        self.search = BeamSearch(beam, root, root.num_top)
        root.num_top = max(root.num_top, 2 * beam.width)
        self.states = [root]
        self._births = count(1)
        self._tops: dict[tuple[int, int], tuple[tuple[int, float], ...]] = {}

    def record(self, state: RequestState, top: tuple[tuple[int, float], ...]) -> bool:
        """Hold a state with its most likely next tokens; return whether all states have theirs."""
        state.is_held = True
        self._tops[state.order] = top
        return len(self._tops) == len(self.states)

    def advance(self) -> list[RequestState]:
        """Choose the next beams; return the states that no beam continues.

        The first beam that continues a state keeps it; the others are forks.  No states remain
        when the search has ended.
        """
        old = self.states
        chosen = self.search.advance([self._tops[s.order] for s in old])
        self._tops.clear()
        self.states = []
        for index, _ in chosen:
            state = old[index]
            is_first = state not in self.states
            self.states.append(
                state if is_first else state.fork((state.order[0], next(self._births)))
            )
        for state, (_, token) in zip(self.states, chosen, strict=True):
            state.accept(token)
            state.is_held = False
        return [state for state in old if state not in self.states]


_Text: TypeAlias = tuple[float, tuple[TokenOutput, ...]]  # sum of log-probabilities, and tokens


class BeamSearch:
    """Open and ended beams of one prompt; ``num_top``: likely tokens to report with each token."""

    def __init__(self, params: BeamParams, root: RequestState, num_top: int) -> None:
        self.params = params
        self._root = root
        self._num_top = num_top
        self._open: list[_Text] = [(0.0, ())]
        self.ended: list[Beam] = []  # best first, at most ``width``

    def advance(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int]]:
        """Extend the open beams; return the next ones as (index of an open beam, token).

        ``tops``: at least 2 x width most likely tokens of each open beam with their
        log-probabilities.  The result is empty when the search has ended.
        """
        width = self.params.width
        candidates = [
            (total + log_prob, index, token, log_prob)
            for index, ((total, _), top) in enumerate(zip(self._open, tops, strict=True))
            for token, log_prob in top
        ]
        candidates.sort(key=lambda c: -c[0])
        length = len(self._open[0][1]) + 1
        chosen: list[tuple[int, int]] = []
        texts: list[_Text] = []
        for rank, (total, index, token, log_prob) in enumerate(candidates[: 2 * width]):
            last = TokenOutput(token, log_prob, tuple(tops[index][: self._num_top]))
            tokens = (*self._open[index][1], last)
            if token not in self._root.end_tokens:
                chosen.append((index, token))
                texts.append((total, tokens))
            elif rank < width and length > self._root.request.params.min_tokens:
                self._end(total, tokens, "stop")
            if len(texts) == width:
                break
        self._open = texts
        best: float = candidates[0][0] / length**self.params.length_penalty
        if len(self.ended) == width and self.ended[-1].score >= best:
            return []  # no open text can become better
        if length < self._root.max_new:
            return chosen
        for total, tokens in texts:
            self._end(total, tokens, "length")
        return []

    def _end(self, total: float, tokens: tuple[TokenOutput, ...], reason: FinishReason) -> None:
        score: float = total / len(tokens) ** self.params.length_penalty
        insort(self.ended, Beam(tokens, score, reason), key=lambda b: -b.score)
        del self.ended[self.params.width :]
