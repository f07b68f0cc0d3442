"""Tokenizer files that tests share: the golden corpus and a small byte-level BPE of it."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

from megatron.training.preprocess.documents import RecordFormat
from megatron.training.preprocess.train import TrainingOptions, train_bpe

DATA = Path(__file__).parents[1] / "golden" / "data"
CORPUS = DATA / "corpus.jsonl.gz"
SPM_MODEL = DATA / "spm.model"


@cache
def corpus_texts() -> tuple[str, ...]:
    """The 420 documents of the golden corpus."""
    with gzip.open(CORPUS, "rt", encoding="utf-8") as file:
        return tuple(json.loads(line)["text"] for line in file)


def write_bpe(directory: Path, vocab_size: int = 600) -> Path:
    """vocab.json, merges.txt and tokenizer.json of a BPE learned from the golden corpus."""
    train_bpe(
        TrainingOptions(
            input=str(CORPUS),
            output_dir=str(directory),
            record_format=RecordFormat(),
            vocab_size=vocab_size,
        )
    )
    return directory
