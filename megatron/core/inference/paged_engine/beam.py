"""Beam search: the texts of the highest score among those that extend the best ones so far.

The score of a text is the sum of its log-probabilities / length ** length_penalty.  Its length
includes the token that ends it.  Each open beam is a request state; `BeamGroup` forks them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from megatron.core.inference.paged_engine.request import (
    Beam,
    BeamParams,
    FinishReason,
    Request,
    TokenOutput,
)
from megatron.core.inference.paged_engine.request_state import RequestState


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


class BeamSearch:
    """Open and ended beams of one prompt; ``num_top``: likely tokens to report with each token."""

    def __init__(self, params: BeamParams, root: RequestState, num_top: int) -> None:
        self.params = params
        self._root = root
        self._num_top = num_top
        self._open = [_Text()]
        self.ended: list[Beam] = []  # best first, at most ``width``

    def advance(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int]]:
        """Extend the open beams; return the next ones as (index of an open beam, token).

        ``tops``: at least 2 x width most likely tokens of each open beam with their
        log-probabilities.  The result is empty when the search has ended.
        """
        width = self.params.width
        candidates = [
            (text.total + log_prob, index, token, log_prob)
            for index, (text, top) in enumerate(zip(self._open, tops, strict=True))
            for token, log_prob in top
        ]
        candidates.sort(key=lambda c: -c[0])
        length = self._open[0].length + 1
        texts = []
        for total, index, token, log_prob in candidates[: 2 * width]:
            last = TokenOutput(token, log_prob, tuple(tops[index][: self._num_top]))
            texts.append(_Text(total, last, index, length, self._open[index]))
        still_open: list[_Text] = []
        for rank, text in enumerate(texts):
            if text.last.token not in self._root.end_tokens:
                still_open.append(text)
            elif rank < width and length > self._root.request.params.min_tokens:
                self._end(text, "stop")
            if len(still_open) == width:
                break
        if len(self.ended) == width and self.ended[-1].score >= self._score(texts[0]):
            # No open text can become better.
            still_open = []
        elif length == self._root.max_new:
            for text in still_open:
                self._end(text, "length")
            still_open = []
        self._open = still_open
        return [(text.index, text.last.token) for text in still_open]

    def _score(self, text: _Text) -> float:
        score: float = text.total / text.length**self.params.length_penalty
        return score

    def _end(self, text: _Text, reason: FinishReason) -> None:
        beam = Beam(text.tokens(), self._score(text), reason)
        insort(self.ended, beam, key=lambda b: -b.score)
        del self.ended[self.params.width :]


@dataclass(frozen=True)
class _Text:
    """A token after the text ``before``; ``index``: of that text among the open ones."""

    total: float = 0.0  # sum of log-probabilities
    last: TokenOutput = TokenOutput(-1, 0.0)
    index: int = 0
    length: int = 0
    before: _Text | None = None

    def tokens(self) -> tuple[TokenOutput, ...]:
        found = []
        text: _Text = self
        while text.before is not None:
            found.append(text.last)
            text = text.before
        return tuple(reversed(found))
