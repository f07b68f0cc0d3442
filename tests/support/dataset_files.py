"""Small datasets and a tokenizer for the tests of this directory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "data"
GOLDEN_PREFIX = str(GOLDEN / "text_text_document")


class Tokenizer:
    """As much of a tokenizer as datasets ask for; no pad token."""

    def __init__(self, vocab_size: int = 512, eod: int = 0) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.unique_identifiers = OrderedDict[str, Any](
            {"class": "_Test", "tokenizer_path": [], "vocab_size": str(vocab_size)}
        )


class GoldenTokenizer(Tokenizer):
    """The identity of the tokenizer that the golden arrays were made with."""

    def __init__(self) -> None:
        super().__init__(vocab_size=512, eod=2)
        self.unique_identifiers = OrderedDict[str, Any](
            {
                "class": "_GPTSentencePieceTokenizer",
                "tokenizer_path": ["spm.model"],
                "vocab_extra_ids": "0",
            }
        )


def write(prefix: Path | str, documents: Sequence[Sequence[int]], dtype: Any = np.uint16) -> str:
    """A .bin/.idx pair of one sequence per document; returns the prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)] if len(document) else [])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered(lengths: Sequence[int], first: int = 1) -> list[list[int]]:
    """Documents of these lengths whose tokens count upwards through all of them."""
    ends = np.cumsum([first, *lengths])
    return [list(range(a, b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def config(**changes: Any) -> GPTDatasetConfig:
    """A config for samples of 8 tokens from the prefix "p" without attention mask."""
    given: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 8,
        "blend": (["p"], None),
        "split": "1",
        "tokenizer": Tokenizer(),
        "create_attention_mask": False,
    }
    if "blend_per_split" in changes:
        given.update(blend=None, split=None)
    return GPTDatasetConfig(**(given | changes))


def dataset(
    prefix: str,
    num_samples: int | None = None,
    split: Split = Split.train,
    indices: Sequence[int] | None = None,
    **changes: Any,
) -> GPTDataset:
    """A GPTDataset over a whole prefix, cached in its own directory."""
    low = IndexedDataset(prefix)
    chosen = np.arange(len(low), dtype=np.int32) if indices is None else np.array(indices, np.int32)
    return GPTDataset(low, prefix, chosen, num_samples, split, config(**changes))
