"""Choose the tokens of a sample to mask: n-grams of complete words within one sentence.

``n`` is the number of tokens of a sample.  ``sentence`` i64 [n] is the number of each token's
sentence, -1 for tokens that are never masked.  Functions keep no state: all randomness comes from
the generator passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_GEOMETRIC_P = 0.2  # SpanBERT: P(length = 1, 2, 3, ...) = 0.2, 0.16, 0.128, ...


def span_weights(
    longest: int, *, favours_long: bool = False, is_geometric: bool = False
) -> np.ndarray:
    """Return the probability of a span of 1, 2, ... ``longest`` words; shorter is likelier.

    ``favours_long`` makes longer spans likelier, ``is_geometric`` uses SpanBERT's distribution.
    """
    n = np.arange(1, longest + 1)
    weights: np.ndarray
    if is_geometric:
        weights = _GEOMETRIC_P * (1 - _GEOMETRIC_P) ** (n - 1)
        weights[-1] += 1 - weights.sum()  # longer spans are cut to `longest`
        return weights
    weights = 1.0 / (n[::-1] if favours_long else n)
    weights /= weights.sum()
    return weights


@dataclass(frozen=True)
class Words:
    """Words of a sample that may be masked, in order; all arrays [words]."""

    starts: np.ndarray  # first token
    ends: np.ndarray  # token after the last
    left: np.ndarray  # words up to the end of the sentence, including this one

    @staticmethod
    def of(sentence: np.ndarray, continues: np.ndarray | None) -> Words:
        """Build the words of a sample.

        ``continues`` bool [n] marks tokens that belong to the word before; None: each token is a
        word.
        """
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
    """Number the runs of equal values 1, 2, 3, ... in order of position.

    Sentence numbers may fall where BERT swaps segments; ``searchsorted`` needs them ascending.
    """
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
    """Return [first, end) of disjoint spans, ascending, with at most ``num_tokens`` tokens in all.

    There are at most ``most_spans`` spans, and at most ``most_with_marks`` tokens plus spans (each
    span needs a sentinel).  ``taken`` [words] marks words to skip; chosen words are marked in it.
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
    """Return the positions of the tokens in the spans, ascending: i64 [masked]."""
    ranges = [np.arange(first, end) for first, end in spans]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)
