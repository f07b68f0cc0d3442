"""BERT samples: one or two segments of sentences, masked, with segment order as a second target.

A sample is [CLS] A [SEP] B [SEP] and padding, up to the sequence length ``s``; without the
classification (binary) head there is no B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.masked_dataset import (
    CountingSentences,
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
    choose_spans,
    positions_of,
)
from megatron.core.datasets.megatron_dataset import Sample

_BECOMES_MASK, _BECOMES_RANDOM = 0.8, 0.1  # shares of masked tokens; the rest is unchanged


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Settings of a masked dataset, and whether samples are pairs of segments."""

    classification_head: bool | None = None  # samples are pairs; the model predicts their order


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """BERT samples as dictionaries of arrays i64 [s], except two scalars.

    text; types (0 for the first segment, 1 for the second); labels (-1 where nothing is predicted);
    loss_mask (1 where a token is predicted); padding_mask (1 for tokens, 0 for padding); is_random
    (scalar: 1 if the segments are swapped, -1 in a sample without loss); truncated (scalar: 1 if
    text was cut off).
    """

    config: BERTMaskedWordPieceDatasetConfig
    special_tokens = ("cls", "sep", "mask", "pad")

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens in a sample: [CLS], and [SEP] after each segment."""
        return 3 if self.config.classification_head else 2

    @property
    def min_sentences(self) -> int:
        """Minimum number of sentences in a sample: one for each segment."""
        return 2 if self.config.classification_head else 1

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "classification_head"]

    def _sample(
        self, sentences: list[np.ndarray], target_length: int, random: np.random.Generator
    ) -> Sample:
        is_pair = self.config.classification_head
        pivot, is_swapped = len(sentences), False
        if is_pair:
            pivot, is_swapped = int(random.integers(1, pivot)), bool(random.random() < 0.5)
        sizes = [len(tokens) for tokens in sentences]
        text = np.concatenate(sentences)
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        segments = np.split(np.arange(len(text)), [sum(sizes[:pivot])])
        if is_swapped:
            segments.reverse()
        excess = len(text) - target_length
        segments = _shorten(segments, excess, random)
        cls, sep, none = (np.array([n]) for n in (self._ids["cls"], self._ids["sep"], -1))
        parts = [(cls, none, np.array([0]))]  # none: [CLS] and [SEP] are never masked
        for i, at in enumerate(segments if is_pair else segments[:1]):
            parts += [(text[at], numbers[at], np.full(len(at), i)), (sep, none, np.array([i]))]
        tokens, sentence, types = map(np.concatenate, zip(*parts, strict=True))
        s, n = self.config.sequence_length, len(tokens)
        labels = _fill(self._hide(tokens, sentence, random), s, -1)
        return {
            "text": _fill(tokens, s, self._ids["pad"]),
            "types": _fill(types, s, 0),
            "labels": labels,
            "is_random": int(is_swapped),
            "loss_mask": (labels >= 0).astype(np.int64),
            "padding_mask": (np.arange(s) < n).astype(np.int64),
            "truncated": int(excess > 0),
        }

    def _without_loss(self, item: Sample) -> Sample:
        return super()._without_loss(item) | {"is_random": -1}

    def _hide(
        self, tokens: np.ndarray, sentence: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Mask tokens in place; return labels i64 [tokens], -1 where nothing is predicted."""
        words = self._words(tokens, sentence)
        budget = self._num_hidden(int((sentence >= 0).sum()))
        taken = bytearray(len(words.starts))
        spans = choose_spans(words, budget, self._ngram_weights, random, taken=taken)
        hidden = positions_of(spans)
        labels = np.full(len(tokens), -1)
        labels[hidden] = tokens[hidden]
        if self.config.masking_do_permutation:
            moved = positions_of(
                choose_spans(words, budget, self._ngram_weights, random, taken=taken)
            )
            labels[moved] = tokens[moved]
            tokens[moved] = tokens[random.permutation(moved)]
        chance = random.random(len(hidden))
        becomes_random = chance >= 1 - _BECOMES_RANDOM
        tokens[hidden[chance < _BECOMES_MASK]] = self._ids["mask"]
        count = int(becomes_random.sum())
        tokens[hidden[becomes_random]] = random.integers(self._vocab_size, size=count)
        return labels


class MockBERTMaskedWordPieceDataset(CountingSentences, BERTMaskedWordPieceDataset):
    """Synthetic BERT samples: token ids count upwards through both segments in original order."""


def _shorten(
    segments: list[np.ndarray], excess: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Remove ``excess`` tokens, first from the longer segment until both have the same length.

    Each segment loses tokens at both ends, in random proportion.
    """
    if excess <= 0:
        return segments
    a, b = map(len, segments)
    of_longer = min(excess, abs(a - b))
    even, odd = divmod(excess - of_longer, 2)
    shorter = []
    lost = (even + of_longer * (a > b), even + odd + of_longer * (b > a))
    for segment, count in zip(segments, lost, strict=True):
        front = int(random.binomial(count, 0.5))
        shorter.append(segment[front : len(segment) - (count - front)])
    return shorter


def _fill(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    return np.concatenate((values, np.full(length - len(values), filler)))
