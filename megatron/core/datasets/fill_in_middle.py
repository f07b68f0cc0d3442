"""Fill in the middle (arXiv 2207.14255): documents are reordered so that a model learns to infill.

A document is cut at two random places into prefix, middle and suffix and becomes

    PSM:  <prefix> prefix <suffix> suffix <middle> middle
    SPM:  <prefix> <suffix> suffix <middle> prefix middle

The cuts lie between tokens, so no text is tokenized again.  The three special tokens take the place
of the last three tokens of the suffix, or of the prefix where the suffix is shorter; all other
tokens are kept, and the length too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FillInMiddle:
    """Settings of the transformation; tokens are ids."""

    rate: float  # share of documents that are reordered
    spm_rate: float  # share of these in the order SPM
    prefix: int
    middle: int
    suffix: int
    eod: int
    # Documents are made of fragments that end with this token, for example files of a repository:
    # each fragment is reordered with probability ``fragment_rate`` instead of the document.
    split: int | None = None
    fragment_rate: float = 0.5
    no_prefix: tuple[int, ...] = ()  # documents that begin with these tokens stay as they are

    def apply(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the tokens i64 [n] of a sample with its documents reordered."""
        if self.rate == 0:
            return tokens
        return np.concatenate(
            [self._document(part, random) for part in _cut(tokens, self.eod)], dtype=np.int64
        )

    def _document(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return a document, with its end-of-document token if it has one."""
        is_chosen = random.random() < self.rate
        start = np.array(self.no_prefix, np.int64)
        begins = len(start) > 0 and np.array_equal(tokens[: len(start)], start)
        if not is_chosen or begins:
            return tokens
        body, end = _without_end(tokens, self.eod)
        if self.split is None:
            return np.concatenate([self._reordered(body, random), end])
        fragments = [
            self._fragment(part, self.split, random)
            if random.random() < self.fragment_rate
            else part
            for part in _cut(body, self.split)
        ]
        return np.concatenate([*fragments, end])

    def _fragment(self, tokens: np.ndarray, last: int, random: np.random.Generator) -> np.ndarray:
        body, end = _without_end(tokens, last)
        return np.concatenate([self._reordered(body, random), end])

    def _reordered(self, tokens: np.ndarray, random: np.random.Generator) -> np.ndarray:
        count = len(tokens)
        is_spm = random.random() < self.spm_rate
        low, high = np.sort(random.integers(0, count + 1, 2)).tolist()
        if count < 3:  # the special tokens do not fit
            return tokens
        prefix = tokens[:low]
        middle = tokens[low:high]
        suffix = tokens[high:]
        left_over = max(0, 3 - len(suffix))
        suffix = suffix[: max(0, len(suffix) - 3)]
        from_prefix = min(left_over, len(prefix))
        prefix = prefix[: len(prefix) - from_prefix]
        middle = middle[: len(middle) - (left_over - from_prefix)]
        first = [self.prefix]
        last = [self.suffix]
        fill = [self.middle]
        if is_spm:
            return np.concatenate([first, last, suffix, fill, prefix, middle])
        return np.concatenate([first, prefix, last, suffix, fill, middle])


def _without_end(tokens: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens before a last token ``end``, and this one if it is there."""
    length = len(tokens) - int(len(tokens) > 0 and tokens[-1] == end)
    return tokens[:length], tokens[length:]


def _cut(tokens: np.ndarray, end: int) -> list[np.ndarray]:
    """Return the parts of ``tokens`` that end with the token ``end``, and the rest."""
    parts = np.split(tokens, np.flatnonzero(tokens == end) + 1)
    return [part for part in parts if len(part)]
