"""What one forward pass of the engine does, as rank 0 decides it and all ranks execute it.

A step processes rows: one row is one token of one request.  The rows of a request are consecutive
and form a segment.  A plan holds integers only and is sent as one array (`to_array`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megatron.core.inference.paged_engine.prompt_images import PromptImage, images_to_arrays

Integers: TypeAlias = npt.NDArray[np.int64]

SAMPLE = -1  # target of an output row whose next token is to be sampled
NO_TOKEN = -1  # result of an output row without finite logits, or without an allowed token
NO_INTEGERS: Integers = np.empty(0, dtype=np.int64)


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


@dataclass(frozen=True)
class Admission:
    """A request that takes ``slot`` in this step: what ranks must know besides its rows.

    ``params``: fields of `SamplingParams` with the seed set, as JSON values.  ``history``: all its
    tokens so far if penalties need them.  ``num_prompt``: number of tokens of its prompt.
    ``source``: tokens that an encoder reads.  ``start_length``: number of its tokens now, which
    chooses the frequencies of LongRoPE.  ``image_starts``: position of the first row of each image.
    """

    slot: int
    params: dict[str, object]
    history: tuple[int, ...] = ()
    num_prompt: int = 0
    source: tuple[int, ...] = ()
    start_length: int = 0
    image_starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """Segments of a step; before it, ``copies`` (from, to) of pages and ``admissions``.

    ``masks``: allowed tokens of the sampled rows of a slot, one bit a token in int32 words
    (llguidance's form), as int64 numbers.  ``images``: of the requests that take these slots.
    Order on each rank: admissions, copies, forward, sampling.
    """

    segments: tuple[Segment, ...] = ()
    admissions: tuple[Admission, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    masks: dict[int, Integers] = field(default_factory=dict)
    images: dict[int, tuple[PromptImage, ...]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of tokens in the forward pass."""
        return sum(len(s.tokens) for s in self.segments)

    @property
    def num_outputs(self) -> int:
        """Number of rows whose logits are computed."""
        return sum(len(s.targets) for s in self.segments)

    def to_array(self) -> Integers:
        """Return the plan as one array of int64."""
        text = json.dumps([vars(a) for a in self.admissions]).encode() if self.admissions else b""
        head = [len(self.segments), len(self.copies), len(self.masks), len(self.images), len(text)]
        for copy in self.copies:
            head += copy
        parts = [np.array(head, dtype=np.int64)]
        if self.segments:
            slots, starts, *arrays, num_drafts = zip(*self.segments, strict=True)
            lengths = ([*map(len, x)] for x in arrays)  # of tokens, pages, targets, ahead
            parts.append(np.array([slots, starts, num_drafts, *lengths]).T.ravel())
            parts += chain.from_iterable(zip(*arrays, strict=True))
        for slot, words in self.masks.items():
            parts += (np.array([slot, len(words)]), words)
        parts += images_to_arrays(self.images)
        parts.append(np.frombuffer(text, dtype=np.uint8).astype(np.int64))
        return np.concatenate(parts)

    @staticmethod
    def from_array(array: Integers) -> StepPlan:
        """Return the plan that `to_array` wrote."""
        at = 0

        def take(count: int) -> Integers:
            nonlocal at
            at += count
            return array[at - count : at]

        num_segments, num_copies, num_masks, num_with_images, num_bytes = take(5).tolist()
        copies = tuple((int(a), int(b)) for a, b in take(2 * num_copies).reshape(-1, 2))
        segments = []
        for slot, start, num_drafts, *lengths in take(7 * num_segments).reshape(-1, 7).tolist():
            tokens, pages, targets, ahead = map(take, lengths)
            segments.append(Segment(slot, start, tokens, pages, targets, ahead, num_drafts))
        masks = {}
        for _ in range(num_masks):
            slot, words = take(2).tolist()
            masks[slot] = take(words)
        images = {}
        for _ in range(num_with_images):
            slot, count = take(2).tolist()
            images[slot] = tuple(PromptImage.from_array(take(int(array[at]))) for _ in range(count))
        text = take(num_bytes).astype(np.uint8).tobytes()
        found = json.loads(text) if text else []
        return StepPlan(tuple(segments), tuple(map(_admission, found)), copies, masks, images)


def _admission(found: dict[str, Any]) -> Admission:
    history = tuple(found.pop("history"))
    source = tuple(found.pop("source"))
    starts = tuple(found.pop("image_starts"))
    return Admission(**found, history=history, source=source, image_starts=starts)


@dataclass(frozen=True)
class StepResult:
    """What output rows gave, in the order of the plan: r rows, n likely tokens each.

    ``tokens`` [r]: the sampled token, or the row's target, or `NO_TOKEN`: the request cannot go
    on.  ``log_probs`` [r]: its log-probability; 0 where the request does not ask for it.
    ``top_tokens`` and ``top_log_probs`` [r, n]: the most likely tokens, best first; n is the
    largest number that a request of the step asks for.  ``drafts`` [segments, d]: what MTP layers
    expect after the sampled token of a segment; `NO_TOKEN` behind its last draft.
    """

    tokens: Integers
    log_probs: npt.NDArray[np.float32]
    top_tokens: Integers
    top_log_probs: npt.NDArray[np.float32]
    drafts: Integers = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
