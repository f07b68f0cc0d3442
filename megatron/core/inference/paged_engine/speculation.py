"""Draft tokens: guesses of the next tokens, verified by one step of the model.

Drafts come from earlier text, or from the model's layers for multi-token prediction (MTP), which
give them together with the token before.  A step processes the last token of a request and its
drafts, and samples after each of them.  The noise of a sample depends on seed, position and token
only, so the samples up to the first that differs from its draft are the tokens that steps without
drafts give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol, TypeAlias

from megatron.core.inference.paged_engine.request import Request
from megatron.core.inference.paged_engine.step_plan import NO_TOKEN

_LONGEST, _SHORTEST = 3, 2  # n-grams that are looked up


class Drafter(Protocol):
    """Guesses tokens of one request."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Note tokens that the request has got: first its prompt, then those generated."""

    def draft(self, limit: int) -> list[int]:
        """Return at most ``limit`` tokens that may follow."""

    def offer(self, drafts: Sequence[int]) -> None:
        """Note what MTP layers expect after the last token."""


MakeDrafter: TypeAlias = Callable[[Request], Drafter]


class NgramDrafter:
    """Guesses that the last tokens are followed by what followed them before (prompt lookup)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> position after its last occurrence

    def extend(self, tokens: Sequence[int]) -> None:
        """Note tokens, in constant time for each."""
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

    def offer(self, drafts: Sequence[int]) -> None:
        """Do nothing: such drafts are not asked for."""


class OfferedDrafter:
    """Guesses what MTP layers have offered."""

    def __init__(self) -> None:
        self._drafts: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Drop the drafts, which stood for these tokens."""
        self._drafts = []

    def draft(self, limit: int) -> list[int]:
        """Return the first ``limit`` offered drafts."""
        return self._drafts[:limit]

    def offer(self, drafts: Sequence[int]) -> None:
        """Note drafts, up to the first `NO_TOKEN`."""
        self._drafts = list(takewhile(lambda token: token != NO_TOKEN, drafts))


def drafter_of(num_draft_layers: int) -> MakeDrafter:
    """Return what makes the drafters of a model with so many MTP layers that draft."""
    kind = OfferedDrafter if num_draft_layers else NgramDrafter
    return lambda request: kind()


class Speculation:
    """Drafts of one request, as many as its last ones let expect, at most ``max_tokens``."""

    def __init__(self, drafter: Drafter, max_tokens: int, prompt: Sequence[int]) -> None:
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._num_tokens = max_tokens
        drafter.extend(prompt)

    def draft(self, limit: int) -> list[int]:
        """Return at most ``limit`` drafts."""
        limit = min(limit, self._num_tokens)
        return self._drafter.draft(limit) if limit > 0 else []

    @property
    def num_next(self) -> int:
        """Largest number of drafts that the step after the next one may have."""
        return min(2 * self._num_tokens, self._max_tokens)

    def record(self, num_drafts: int, new: Sequence[int], offered: Sequence[int] = ()) -> None:
        """Note generated tokens, which a step with ``num_drafts`` drafts gave.

        ``offered``: what MTP layers expect after them.
        """
        self._drafter.extend(new)
        self._drafter.offer(offered)
        if num_drafts and len(new) > num_drafts:
            self._num_tokens = self.num_next
        elif num_drafts:
            self._num_tokens = len(new)


def new_speculation(
    request: Request, max_tokens: int, make_drafter: MakeDrafter
) -> Speculation | None:
    """Return the drafts of a request, or None if its samples depend on more than the tokens."""
    if not max_tokens or request.params.has_penalty or request.matcher or request.beam:
        return None
    if request.images:  # earlier text repeats ids of images
        return None
    return Speculation(make_drafter(request), max_tokens, request.prompt)
