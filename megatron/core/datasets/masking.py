"""Which tokens of a sample are hidden: whole words, in n-grams that cross no sentence.

``n`` tokens of a sample.  ``sentence`` i64 [n] numbers the sentence of each token; -1 marks tokens
that are never hidden.  Nothing here keeps state: all chance comes from the generator handed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_GEOMETRIC_P = 0.2  # SpanBERT's: lengths of 1, 2, 3 ... at 0.2, 0.16, 0.128 ...


def span_weights(
    longest: int, *, favours_long: bool = False, is_geometric: bool = False
) -> np.ndarray:
    """The probability that a span has 1, 2, ... ``longest`` words; by default short ones win."""
    n = np.arange(1, longest + 1)
    weights: np.ndarray
    if is_geometric:
        weights = _GEOMETRIC_P * (1 - _GEOMETRIC_P) ** (n - 1)
        weights[-1] += 1 - weights.sum()  # what is longer is cut
        return weights
    weights = 1.0 / (n[::-1] if favours_long else n)
    weights /= weights.sum()
    return weights


@dataclass(frozen=True)
class Words:
    """Words of a sample that may be hidden, in order; all arrays [words]."""

    starts: np.ndarray  # first token
    ends: np.ndarray  # token after the last
    left: np.ndarray  # words to the end of the sentence, this one included

    @staticmethod
    def of(sentence: np.ndarray, continues: np.ndarray | None) -> Words:
        """``continues`` bool [n]: tokens that belong to the word before; None: each is a word."""
        is_start = np.ones(len(sentence), bool)
        if continues is not None:
            is_start = ~continues
            is_start[0] = True
            is_start[1:] |= sentence[1:] != sentence[:-1]
        is_start |= sentence < 0
        edges = np.flatnonzero(is_start)
        ends = np.append(edges[1:], len(sentence))
        is_word = sentence[edges] >= 0
        starts, ends = edges[is_word], ends[is_word]
        run = _rising(sentence[starts])
        last = np.searchsorted(run, run, side="right")
        return Words(starts, ends, last - np.arange(len(starts)))


def _rising(numbers: np.ndarray) -> np.ndarray:
    """The same runs, numbered upwards: parts of a sample may have changed places."""
    is_new = np.ones(len(numbers), bool)
    is_new[1:] = numbers[1:] != numbers[:-1]
    return np.cumsum(is_new)


def choose_spans(
    words: Words,
    num_tokens: int,
    weights: np.ndarray,
    random: np.random.Generator,
    *,
    most_spans: int | None = None,
    most_with_marks: int | None = None,
    taken: bytearray | None = None,
) -> list[tuple[int, int]]:
    """[first, end) of spans that hide at most ``num_tokens`` tokens; rising, none overlaps.

    There are at most ``most_spans``, and at most ``most_with_marks`` tokens and spans together.
    ``taken`` [words] names words to leave out, and is filled with those chosen.
    """
    count = len(words.starts)
    taken = bytearray(count) if taken is None else taken
    starts, ends = words.starts.tolist(), words.ends.tolist()
    sizes = 1 + random.choice(len(weights), count, p=weights)
    sizes = np.minimum(sizes, words.left)
    spans: list[tuple[int, int]] = []
    left = num_tokens
    room = 2 * num_tokens if most_with_marks is None else most_with_marks
    for first in random.permutation(count).tolist():
        fits = min(left, room - 1)
        if fits <= 0 or len(spans) == most_spans:
            break
        if taken[first]:
            continue
        next_taken = taken.find(1, first, first + int(sizes[first]))
        size = int(sizes[first]) if next_taken < 0 else next_taken - first
        while size and ends[first + size - 1] - starts[first] > fits:
            size -= 1
        if not size:
            continue
        taken[first : first + size] = b"\1" * size
        spans.append((starts[first], ends[first + size - 1]))
        hidden = spans[-1][1] - spans[-1][0]
        left, room = left - hidden, room - hidden - 1
    return sorted(spans)


def positions_of(spans: list[tuple[int, int]]) -> np.ndarray:
    """The tokens of the spans, rising: i64 [hidden]."""
    ranges = [np.arange(first, end) for first, end in spans]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)
