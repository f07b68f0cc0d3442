"""A step in the making, and the rows that it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.core.inference.paged_engine.prompt_images import PromptImage
from megatron.core.inference.paged_engine.request import TokenOutput
from megatron.core.inference.paged_engine.request_state import RequestState
from megatron.core.inference.paged_engine.step_plan import (
    NO_INTEGERS,
    SAMPLE,
    Admission,
    Integers,
    Segment,
    StepPlan,
    StepResult,
)


@dataclass
class StepBuilder:
    """Collects the segments of a plan; ``room``: rows that it may still get.

    ``num_ahead``: number of tokens after a row that MTP layers read.
    """

    room: int
    num_ahead: int = 0
    states: list[RequestState] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    masks: dict[int, Integers] = field(default_factory=dict)
    images: dict[int, tuple[PromptImage, ...]] = field(default_factory=dict)

    def add(
        self,
        state: RequestState,
        count: int,
        drafts: Sequence[int],
        num_pages: int,
        num_wanted: int = 0,
    ) -> None:
        """Add the next ``count`` rows of a running request, then one for each of its drafts.

        ``num_wanted``: drafts that MTP layers should give.
        """
        request = state.request
        slot = request.slot
        assert slot is not None, "a request without a slot does not run"
        start = request.num_cached
        end = start + count
        tokens = state.tokens.values[start:end]
        targets = state.targets(end)
        if drafts:
            tokens = np.concatenate([tokens, np.array(drafts, dtype=np.int64)])
            targets = np.full(1 + len(drafts), SAMPLE, dtype=np.int64)
        if request.matcher is not None and end == state.goal:
            self.masks[slot] = request.matcher.allowed().astype(np.int64)
        pages = state.pages.values[:num_pages]
        ahead = NO_INTEGERS
        if self.num_ahead:
            ahead = state.tokens.values[end : min(end + self.num_ahead, state.tokens.size)]
        self.segments.append(Segment(slot, start, tokens, pages, targets, ahead, num_wanted))
        self.states.append(state)
        self.room -= len(tokens)
        state.is_in_flight = True

    def admit(self, state: RequestState) -> None:
        """Let a request, which has a slot, start."""
        admission = state.admission()
        self.admissions.append(admission)
        if state.request.images:
            self.images[admission.slot] = state.request.images

    def plan(self) -> StepPlan:
        """Return the plan."""
        return StepPlan(
            tuple(self.segments),
            tuple(self.admissions),
            tuple(self.copies),
            self.masks,
            self.images,
        )


@dataclass(frozen=True)
class StepInFlight:
    """A plan, the states of its segments, and the version of the weights that execute it."""

    plan: StepPlan
    states: list[RequestState]
    weight_version: int


class ResultRows:
    """Output rows of a step; ``at``: the first row of the current segment, ``segment``."""

    def __init__(self, result: StepResult, weight_version: int) -> None:
        self.at = self.segment = 0
        self.weight_version = weight_version
        self._result = result
        self._tokens = result.tokens.tolist()
        self._log_probs = result.log_probs.tolist()

    def drafts(self) -> list[int]:
        """Return what MTP layers expect after the tokens of the segment."""
        if not len(self._result.drafts):
            return []
        found: list[int] = self._result.drafts[self.segment].tolist()
        return found

    def advance(self, num_rows: int) -> None:
        """Go on to the next segment; the current one has ``num_rows`` output rows."""
        self.at += num_rows
        self.segment += 1

    def output(self, row: int, num_top: int) -> TokenOutput:
        """Return row ``row`` of the segment with its ``num_top`` most likely tokens."""
        row += self.at
        top: tuple[tuple[int, float], ...] = ()
        if num_top:
            tokens = self._result.top_tokens[row, :num_top].tolist()
            log_probs = self._result.top_log_probs[row, :num_top].tolist()
            top = tuple(zip(tokens, log_probs, strict=True))
        return TokenOutput(self._tokens[row], self._log_probs[row], top)
