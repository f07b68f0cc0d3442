"""Base of the BERT and T5 datasets: samples are complete sentences with some tokens masked.

A document is a list of sentences (``preprocess_data.py --split-sentences``); --split divides
documents.  The content and masks of a sample depend only on the data, the seed and the sample
number.

Masked are n-grams of complete words within one sentence.  ``n`` is the number of tokens of a
sample.  ``sentence`` i64 [n] is the number of each token's sentence, -1 for tokens that are never
masked.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.index_cache import cached_arrays
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import (
    LowLevelDataset,
    MegatronDataset,
    Sample,
    SyntheticDataset,
)
from megatron.core.datasets.utils import Split
from megatron.core.progress import Progress

_GEOMETRIC_P = 0.2  # SpanBERT: P(length = 1, 2, 3, ...) = 0.2, 0.16, 0.128, ...


def span_weights(
    longest: int, *, favors_long: bool = False, is_geometric: bool = False
) -> np.ndarray:
    """Return the probability of a span of 1, 2, ... ``longest`` words; shorter is likelier.

    ``favors_long`` makes longer spans likelier, ``is_geometric`` uses SpanBERT's distribution.
    """
    n = np.arange(1, longest + 1)
    weights: np.ndarray
    if is_geometric:
        weights = _GEOMETRIC_P * (1 - _GEOMETRIC_P) ** (n - 1)
        weights[-1] += 1 - weights.sum()  # longer spans are cut to `longest`
        return weights
    weights = 1.0 / (n[::-1] if favors_long else n)
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


logger = logging.getLogger(__name__)

_MOST_EPOCHS = np.iinfo(np.int32).max - 1  # build_mapping stops earlier, at the samples requested
_MOST_SAMPLES = np.iinfo(np.int64).max - 1


@dataclass(kw_only=True)
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings for building samples from sentences, and for masking them."""

    masking_probability: float  # share of tokens that are masked
    short_sequence_probability: float  # share of samples with a random, shorter length
    masking_max_ngram: int  # maximum number of words in a masked span
    masking_do_full_word: bool  # mask pieces that begin with ## with their word
    masking_do_permutation: bool  # permute and predict as many tokens again
    masking_use_longer_ngrams: bool  # make long n-grams likelier
    masking_use_geometric_distribution: bool  # sample n-gram lengths as SpanBERT

    def __post_init__(self) -> None:
        super().__post_init__()
        masked = self.masking_probability
        short = self.short_sequence_probability
        if not (0 < masked < 1 and 0 <= short <= 1):
            raise ConfigError(
                f"--mask-prob {masked} and --short-seq-prob {short} must be between 0 and 1"
            )
        if self.masking_max_ngram < 1:
            raise ConfigError(f"masking_max_ngram {self.masking_max_ngram}: it is 1 or more")
        if self.masking_use_longer_ngrams and self.masking_use_geometric_distribution:
            raise ConfigError(
                "masking_use_longer_ngrams and masking_use_geometric_distribution are two rules "
                "for the lengths of n-grams: give one of them"
            )


class MaskedWordPieceDataset(MegatronDataset):
    """Samples of one split of an indexed dataset whose documents are lists of sentences.

    ``dataset[None]`` is a sample with a zero loss mask, which pads an incomplete batch.
    """

    config: MaskedWordPieceDatasetConfig
    dataset: IndexedDataset
    split_unit = "documents"
    special_tokens: tuple[str, ...]  # attributes of the tokenizer

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        longest = config.sequence_length - self.num_special_tokens
        if longest < 2:
            raise ConfigError(
                f"--seq-length {config.sequence_length} leaves {longest} tokens of text beside "
                f"{self.num_special_tokens} special ones: give more"
            )
        self._longest_text = longest
        self._vocab_size: int = config.tokenizer.vocab_size
        self._num_text_ids: int = self._vocab_size  # of synthetic data: higher ids are special
        self._ids = {name: self._special_id(name) for name in self.special_tokens}
        self._ngram_weights = span_weights(
            config.masking_max_ngram,
            favors_long=config.masking_use_longer_ngrams,
            is_geometric=config.masking_use_geometric_distribution,
        )
        # [vocabulary], True where a token continues a word; None if no token does.
        self._continues: np.ndarray | None = None
        if config.masking_do_full_word:
            vocab = config.tokenizer.vocab.items()
            ids = [index for token, index in vocab if token.startswith("##") and len(token) > 2]
            if ids:
                self._continues = np.isin(np.arange(self._vocab_size), ids)
        self.sample_index = self._build_sample_index(longest, self.min_sentences)

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens in a sample."""
        return 2

    @property
    def min_sentences(self) -> int:
        """Minimum number of sentences in a sample."""
        return 1

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *MegatronDataset._key_config_attributes(),
            "masking_probability",
            "short_sequence_probability",
            "masking_max_ngram",
            "masking_do_full_word",
            "masking_do_permutation",
            "masking_use_longer_ngrams",
            "masking_use_geometric_distribution",
        ]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Return the number of documents: --split divides documents."""
        assert isinstance(low_level_dataset, IndexedDataset)
        return len(low_level_dataset.document_indices) - 1

    def __len__(self) -> int:
        return len(self.sample_index)

    def __getitem__(self, idx: int | None) -> Sample:
        number = 0 if idx is None else int(idx)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        random = self.random_of(number)
        sentences, target_length = self._sentences(number, random)
        item = self._sample(sentences, target_length, random)
        return self._without_loss(item) if idx is None else item

    def _without_loss(self, item: Sample) -> Sample:
        """Return the sample with a zero loss mask, for padding a batch."""
        return item | {"loss_mask": np.zeros_like(item["loss_mask"])}

    @abstractmethod
    def _sample(
        self, sentences: list[np.ndarray], target_length: int, random: np.random.Generator
    ) -> Sample:
        """Return the model inputs for ``sentences``, cut to ``target_length`` tokens of text."""

    def _special_id(self, name: str) -> int:
        """Return the id of a special token.

        Raises ConfigError, which is an AttributeError too, if the tokenizer has no such token.
        """
        return int(getattr(self.config.tokenizer, name))

    def _sentences(self, number: int, random: np.random.Generator) -> tuple[list[np.ndarray], int]:
        """Return the sentences of a sample and its maximum number of text tokens."""
        first, end, target_length = self.sample_index[number].tolist()
        if not 0 <= first < end <= len(self.dataset):
            raise DataError(
                f"{self._cache_prefix()}-*.npy do not belong to {self.dataset_path} (sentences "
                f"{first} to {end} of {len(self.dataset)}): remove them"
            )
        sentences = [self.dataset.get(i).astype(np.int64) for i in range(first, end)]
        for i, tokens in enumerate(sentences):
            self._check_ids(first + i, tokens)
        return sentences, target_length

    def _words(self, tokens: np.ndarray, sentence: np.ndarray) -> Words:
        return Words.of(sentence, None if self._continues is None else self._continues[tokens])

    def _num_hidden(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` text tokens to mask: at least one."""
        return max(1, round(num_tokens * self.config.masking_probability))

    def _build_sample_index(
        self, sequence_length: int, min_sentences_per_sample: int
    ) -> np.ndarray:
        """Load [n, 3] sentences and target length of each sample from the cache, or build them.

        See ``helpers.build_mapping``.  Not a collective: one process builds, the others wait.
        """

        def build() -> list[np.ndarray]:
            low, high = int(self.indices[0]), int(self.indices[-1])
            documents = self.dataset.document_indices[low : high + 2]
            with Progress("building the index of sentences"):
                mapping = helpers.build_mapping(
                    documents,
                    self.dataset.sequence_lengths,
                    1 if self.num_samples is None else _MOST_EPOCHS,
                    _MOST_SAMPLES if self.num_samples is None else self.num_samples,
                    sequence_length,
                    self.config.short_sequence_probability,
                    self.config.random_seed,
                    False,
                    min_sentences_per_sample,
                )
            self._log_unused_documents(documents, min_sentences_per_sample, len(mapping))
            return [mapping]

        shapes = {"sample_index": (3,)}
        (found,) = cached_arrays(
            self._cache_prefix(), self.unique_description, shapes, build, self.dataset.identity
        )
        return found

    def _log_unused_documents(
        self, documents: np.ndarray, min_sentences: int, num_rows: int
    ) -> None:
        """Log how many documents give no sample; raise DataError if no document gives one."""
        is_long = self.dataset.sequence_lengths > helpers.LONGEST_SENTENCE
        num_long = np.append(0, np.cumsum(is_long))[documents]
        is_unused = (np.diff(documents) < min_sentences) | (np.diff(num_long) > 0)
        message = (
            f"the {self.index_split.name} split of {self.dataset_path}: {is_unused.sum()} of "
            f"{len(is_unused)} documents have fewer than {min_sentences} sentences, or one of more "
            f"than {helpers.LONGEST_SENTENCE} tokens, and give no samples; preprocess the data "
            "with --split-sentences"
        )
        if num_rows == 0:
            raise DataError(message)
        if is_unused.any():
            logger.warning(message)


class CountingSentences(SyntheticDataset, MaskedWordPieceDataset):
    """Synthetic, learnable samples: token ids count upwards from a random, often low, id.

    A sample depends only on the seed, the split and the sample number; it needs no file.
    """

    _SENTENCE_LENGTHS = (4, 32)

    def _build_sample_index(
        self, sequence_length: int, min_sentences_per_sample: int
    ) -> np.ndarray:
        return np.empty((0, 3), np.uint32)

    def _special_id(self, name: str) -> int:
        try:
            return super()._special_id(name)
        except AttributeError:
            return self._make_up_id()

    def _make_up_id(self) -> int:
        """Reserve the largest id that is still a text token, and return it as a special token."""
        self._num_text_ids -= 1
        return self._num_text_ids

    def _sentences(self, number: int, random: np.random.Generator) -> tuple[list[np.ndarray], int]:
        target = self._longest_text
        if random.random() < self.config.short_sequence_probability:
            target = int(random.integers(2, target + 1))
        sizes = random.integers(*self._SENTENCE_LENGTHS, target // 4 + 2)
        num_sentences = int(np.searchsorted(np.cumsum(sizes), target)) + 1
        ends = np.cumsum(sizes[: max(num_sentences, self.min_sentences)])
        first = int(self._num_text_ids * random.random() ** 4)
        text = (first + np.arange(ends[-1])) % self._num_text_ids
        return np.split(text, ends[:-1]), target
