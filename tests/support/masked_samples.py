"""Sentences, a WordPiece-like tokenizer and configs for the tests of masked datasets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.utils import Split
from megatron.training.tokenizer.base import _NullTokenizer

VOCAB_SIZE = 1000
FIRST_CONTINUATION = 700  # from here on tokens continue a word
NUM_SENTINELS = 40


class WordPieces:
    """Ids 0 to 6 and the last 40 are special; 700 to 959 begin with ##."""

    pad, cls, sep, mask, bos, eos, eod = 0, 1, 2, 3, 4, 5, 6
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.vocab = {
            ("##" if FIRST_CONTINUATION <= i < 960 else "") + f"t{i}": i for i in range(VOCAB_SIZE)
        }
        self.additional_special_tokens_ids = list(range(960, 960 + NUM_SENTINELS))
        self.unique_identifiers = OrderedDict[str, Any](
            {"class": "_WordPieces", "tokenizer_path": ["vocab.txt"], "vocab_extra_ids": "40"}
        )


def write_sentences(prefix: Path | str, documents: Sequence[Sequence[int]], seed: int = 0) -> str:
    """Documents given by the lengths of their sentences; half of the tokens continue words."""
    random = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for lengths in documents:
        tokens = random.integers(10, 960, sum(lengths))
        builder.add_document(tokens, list(lengths))
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def corpus(prefix: Path, num_documents: int = 40, seed: int = 0) -> str:
    """Documents of 2 to 12 sentences of 3 to 30 tokens."""
    random = np.random.default_rng(seed)
    return write_sentences(
        prefix,
        [random.integers(3, 30, random.integers(2, 13)).tolist() for _ in range(num_documents)],
        seed,
    )


def _given(prefix: str, changes: dict[str, Any]) -> dict[str, Any]:
    return {
        "random_seed": 1234,
        "sequence_length": 128,
        "blend": ([prefix], None),
        "split": "1",
        "tokenizer": WordPieces(),
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_max_ngram": 3,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "masking_use_geometric_distribution": False,
    } | changes


def bert_config(prefix: str = "p", **changes: Any) -> BERTMaskedWordPieceDatasetConfig:
    """Pairs of 128 tokens."""
    return BERTMaskedWordPieceDatasetConfig(
        **_given(prefix, {"classification_head": True} | changes)
    )


def t5_config(prefix: str = "p", **changes: Any) -> T5MaskedWordPieceDatasetConfig:
    """128 tokens for the encoder, 48 for the decoder, spans as SpanBERT draws them."""
    usual = {
        "sequence_length_decoder": 48,
        "masking_max_ngram": 10,
        "masking_use_geometric_distribution": True,
    }
    return T5MaskedWordPieceDatasetConfig(**_given(prefix, usual | changes))


def bert_dataset(
    prefix: str, num_samples: int | None = None, **changes: Any
) -> BERTMaskedWordPieceDataset:
    """All documents of a prefix as training data."""
    low = IndexedDataset(prefix)
    chosen = np.arange(len(low.document_indices) - 1, dtype=np.int32)
    config = bert_config(prefix, **changes)
    return BERTMaskedWordPieceDataset(low, prefix, chosen, num_samples, Split.train, config)


def t5_dataset(
    prefix: str, num_samples: int | None = None, **changes: Any
) -> T5MaskedWordPieceDataset:
    """All documents of a prefix as training data."""
    low = IndexedDataset(prefix)
    chosen = np.arange(len(low.document_indices) - 1, dtype=np.int32)
    config = t5_config(prefix, **changes)
    return T5MaskedWordPieceDataset(low, prefix, chosen, num_samples, Split.train, config)


MOCK: dict[str, Any] = {"blend": None, "split": None, "tokenizer": _NullTokenizer(100)}


def made_up(kind: Any, config: Any) -> Any:
    """40 made-up training samples."""
    source = kind.build_low_level_dataset(None, config)
    return kind(source, None, np.arange(3, dtype=np.int32), 40, Split.train, config)
