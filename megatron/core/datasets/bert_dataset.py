"""Samples of BERT: one or two runs of sentences, some tokens hidden, the order perhaps reversed.

``s`` is the sequence length.  [CLS] A [SEP] B [SEP] and padding; without the binary head there
is no B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.masked_dataset import (
    CountingSentences,
    MaskedWordPieceDataset,
    MaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.masking import choose_spans, positions_of
from megatron.core.datasets.megatron_dataset import Sample

_BECOMES_MASK, _BECOMES_RANDOM = 0.8, 0.1  # shares of the hidden tokens; the rest stays as it is


@dataclass(kw_only=True)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """The same, and whether samples are pairs."""

    classification_head: bool  # A and B, which the model tells apart from B and A


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples as dictionaries of arrays, all i64 [s] but for two numbers.

    text; types (0 for A, 1 for B); labels (-1 where nothing is predicted); loss_mask (1 where a
    token is predicted); padding_mask (1 for tokens, 0 for padding); is_random (whether B comes
    first; -1 in a sample without loss); truncated (whether text was cut off).
    """

    config: BERTMaskedWordPieceDatasetConfig
    special_tokens = ("cls", "sep", "mask", "pad")

    @property
    def num_special_tokens(self) -> int:
        """[CLS] and a [SEP] behind each part."""
        return 3 if self.config.classification_head else 2

    @property
    def min_sentences(self) -> int:
        """One for each part."""
        return 2 if self.config.classification_head else 1

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "classification_head"]

    def _sample(
        self, sentences: list[np.ndarray], target_length: int, random: np.random.Generator
    ) -> Sample:
        pivot, is_swapped = len(sentences), False
        if self.config.classification_head:
            pivot, is_swapped = int(random.integers(1, pivot)), bool(random.random() < 0.5)
        numbers = np.repeat(np.arange(len(sentences)), [len(tokens) for tokens in sentences])
        cut = sum(len(tokens) for tokens in sentences[:pivot])
        text = np.concatenate(sentences)
        parts = [(text[:cut], numbers[:cut]), (text[cut:], numbers[cut:])]
        if is_swapped:
            parts.reverse()
        excess = len(text) - target_length
        parts = _shortened(parts, excess, random)
        tokens, sentence, types = self._joined(parts)
        labels = self._hide(tokens, sentence, random)
        s, n = self.config.sequence_length, len(tokens)
        padding_mask = (np.arange(s) < n).astype(np.int64)
        labels = _filled(labels, s, -1)
        return {
            "text": _filled(tokens, s, self._ids["pad"]),
            "types": _filled(types, s, 0),
            "labels": labels,
            "is_random": int(is_swapped),
            "loss_mask": (labels >= 0).astype(np.int64),
            "padding_mask": padding_mask,
            "truncated": int(excess > 0),
        }

    def _without_loss(self, item: Sample) -> Sample:
        return super()._without_loss(item) | {"is_random": -1}

    def _joined(
        self, parts: list[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens with [CLS] and [SEP], the sentence of each (-1 for those), and its part."""
        if not self.config.classification_head:
            parts = parts[:1]
        cls, sep, none = (np.array([n]) for n in (self._ids["cls"], self._ids["sep"], -1))
        tokens, sentence, types = [cls], [none], [np.array([0])]
        for i, (text, numbers) in enumerate(parts):
            tokens += [text, sep]
            sentence += [numbers, none]
            types.append(np.full(len(text) + 1, i))
        return np.concatenate(tokens), np.concatenate(sentence), np.concatenate(types)

    def _hide(
        self, tokens: np.ndarray, sentence: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """Hide tokens in place; their labels, and -1 for all others: i64 [tokens]."""
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
    """Made-up samples of BERT: in order A and B count upwards through both."""


def _shortened(
    parts: list[tuple[np.ndarray, np.ndarray]], excess: int, random: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut ``excess`` tokens off, from the longer part first, from both ends of it by chance."""
    if excess <= 0:
        return parts
    a, b = (len(text) for text, _ in parts)
    of_longer = min(excess, abs(a - b))
    even, odd = divmod(excess - of_longer, 2)
    lost = [even + of_longer * (a > b), even + odd + of_longer * (b > a)]
    shorter = []
    for (text, numbers), count in zip(parts, lost, strict=True):
        front = int(random.binomial(count, 0.5))
        kept = slice(front, len(text) - (count - front))
        shorter.append((text[kept], numbers[kept]))
    return shorter


def _filled(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    return np.concatenate((values, np.full(length - len(values), filler)))
