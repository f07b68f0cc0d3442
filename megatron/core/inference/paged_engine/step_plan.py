"""One forward pass of the engine: the plan that rank 0 makes and all ranks execute, and its output.

A step processes rows: one row is one token of one request.  The rows of a request are consecutive
and form a segment.  Ranks send each other plans and outputs as arrays of int64 (`to_array`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron.core.inference.paged_engine.request import PromptImage

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]

SAMPLE = -1  # target of an output row whose next token is to be sampled
NO_TOKEN = -1  # result of an output row without finite logits, or without an allowed token
NO_INTEGERS: Integers = np.empty(0, dtype=np.int64)
SAMPLE_ONLY: Integers = np.array([SAMPLE], dtype=np.int64)


class Segment(NamedTuple):
    """Rows of one request: ``tokens`` [n] at positions ``start`` to ``start + n - 1``.

    ``slot``: index of the request in the state of every rank, below --inference-max-requests.
    ``pages``: the pages that hold positions 0 to start + n - 1, in order, or a few more.
    ``targets`` [m]: one for each of the last m rows, whose logits are computed: the token that
    follows, whose log-probability is wanted, or `SAMPLE`.  Empty: a part of a prompt.
    ``ahead``: known tokens after the last row, as many as MTP layers read.  ``num_drafts``: drafts
    that MTP layers should give of the tokens after the sampled one.
    """

    slot: int
    start: int
    tokens: Integers
    pages: Integers
    targets: Integers
    ahead: Integers = NO_INTEGERS
    num_drafts: int = 0

    @property
    def num_keys(self) -> int:
        """Number of tokens in the cache after this step."""
        return self.start + len(self.tokens)


def idle_segment(slot: int, page: int, targets: Integers = NO_INTEGERS) -> Segment:
    """Return a row of no request, in the cache's extra ``slot`` and ``page``."""
    return Segment(slot, 0, np.zeros(1, np.int64), np.array([page]), targets)


@dataclass(frozen=True)
class Admission:
    """A request that takes ``slot`` in this step: its parameters and other facts for all ranks.

    ``params``: fields of `SamplingParams` with the seed set, as JSON values.  ``history``: all its
    tokens so far if penalties need them.  ``num_prompt``: number of tokens of its prompt.
    ``source``: tokens that an encoder reads.  ``start_length``: number of its tokens now, which
    chooses the frequencies of LongRoPE.  ``images``: of its prompt; ``image_starts``: the first row
    of each.
    """

    slot: int
    params: Mapping[str, object]
    history: tuple[int, ...] = ()
    num_prompt: int = 0
    source: tuple[int, ...] = ()
    start_length: int = 0
    image_starts: tuple[int, ...] = ()
    images: tuple[PromptImage, ...] = ()

    @staticmethod
    def from_json(found: dict[str, Any]) -> Admission:
        """Return an admission from the JSON values of its fields."""
        lists = {name: tuple(found[name]) for name in ("history", "source", "image_starts")}
        images = tuple(map(PromptImage.from_json, found["images"]))
        return Admission(**{**found, **lists, "images": images})


@dataclass(frozen=True)
class StepPlan:
    """Segments of a step; before it, ``copies`` (from, to) of pages and ``admissions``.

    ``masks``: allowed tokens of the sampled rows of a slot, one bit a token in int32 words
    (llguidance's form), as int64 numbers.  Order on each rank: admissions, copies, forward,
    sampling.
    """

    segments: list[Segment] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    masks: dict[int, Integers] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of tokens in the forward pass."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def num_outputs(self) -> int:
        """Number of rows whose logits are computed."""
        return sum(len(s.targets) for s in self.segments)

    def to_array(self) -> Integers:
        """Return the plan as one array."""
        text = NO_INTEGERS
        if self.admissions:
            text = text_to_array(json.dumps(self.admissions, default=_json_values))
        head = [len(self.segments), len(self.copies), len(self.masks)]
        parts = [np.array([*head, *chain.from_iterable(self.copies)], dtype=np.int64)]
        if self.segments:
            slots, starts, *arrays, num_drafts = zip(*self.segments, strict=True)
            lengths = ([*map(len, x)] for x in arrays)  # of tokens, pages, targets, ahead
            parts.append(np.array([slots, starts, num_drafts, *lengths]).T.ravel())
            parts += chain.from_iterable(zip(*arrays, strict=True))
        for slot, words in self.masks.items():
            parts += (np.array([slot, len(words)]), words)
        return np.concatenate([*parts, text])

    @staticmethod
    def from_array(array: Integers) -> StepPlan:
        """Return the plan that `to_array` wrote."""
        at = 0

        def take(count: int) -> Integers:
            nonlocal at
            at += count
            return array[at - count : at]

        plan = StepPlan()
        num_segments, num_copies, num_masks = take(3).tolist()
        plan.copies.extend((int(a), int(b)) for a, b in take(2 * num_copies).reshape(-1, 2))
        for slot, start, num_drafts, *lengths in take(7 * num_segments).reshape(-1, 7).tolist():
            tokens, pages, targets, ahead = map(take, lengths)
            plan.segments.append(Segment(slot, start, tokens, pages, targets, ahead, num_drafts))
        for _ in range(num_masks):
            slot, words = take(2).tolist()
            plan.masks[slot] = take(words)
        if at < len(array):
            plan.admissions.extend(map(Admission.from_json, json.loads(array_to_text(array[at:]))))
        return plan


def _json_values(value: Any) -> object:
    return value.to_json() if isinstance(value, PromptImage) else vars(value)


def text_to_array(text: str) -> Integers:
    """Return a text with spaces at its end as int64, 8 bytes in each."""
    data = text.encode()
    return np.frombuffer(data + b" " * (-len(data) % 8), dtype=np.int64)


def array_to_text(array: Integers) -> str:
    """Return the text of `text_to_array`."""
    return array.tobytes().decode()


class StepOutput(NamedTuple):
    """Output rows of a step, in the order of the plan: r rows, n likely tokens each.

    ``tokens`` [r]: the sampled token, or the row's target, or `NO_TOKEN`: the request cannot go
    on.  ``log_probs`` [r]: its log-probability; 0 where the request does not ask for it.
    ``top_tokens`` and ``top_log_probs`` [r, n]: the most likely tokens, best first; n is the
    largest number that a request of the step asks for.  ``drafts`` [segments, d]: of MTP layers,
    after the sampled token of a segment; `NO_TOKEN` after its last draft.
    """

    tokens: Integers = NO_INTEGERS
    log_probs: Floats = NO_INTEGERS.astype(np.float32)
    top_tokens: Integers = NO_INTEGERS.reshape(0, 0)
    top_log_probs: Floats = NO_INTEGERS.reshape(0, 0).astype(np.float32)
    drafts: Integers = NO_INTEGERS.reshape(0, 0)

    def to_array(self) -> Integers:
        """Return the output as one array; log-probabilities as the bits of float64."""
        shape = np.array([*self.top_tokens.shape, *self.drafts.shape], dtype=np.int64)
        floats = (self.log_probs, self.top_log_probs)
        bits = (x.astype(np.float64).ravel().view(np.int64) for x in floats)
        return np.concatenate(
            [shape, self.tokens, self.top_tokens.ravel(), self.drafts.ravel(), *bits]
        )

    @staticmethod
    def from_array(array: Integers) -> StepOutput:
        """Return the output that `to_array` wrote."""
        rows, tops, segments, length = array[:4].tolist()
        sizes = np.cumsum([rows, rows * tops, segments * length, rows])
        tokens, top_tokens, drafts, *bits = np.split(array[4:], sizes)
        log_probs, top_log_probs = (
            np.ascontiguousarray(x).view(np.float64).astype(np.float32) for x in bits
        )
        return StepOutput(
            tokens,
            log_probs,
            top_tokens.reshape(rows, tops),
            top_log_probs.reshape(rows, tops),
            drafts.reshape(segments, length),
        )
