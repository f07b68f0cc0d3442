"""preprocess_data_nmt.py: sequence n is line n."""

from __future__ import annotations

import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer
from tests.support.tokenizer_files import SPM_MODEL
from tools import preprocess_data_nmt

TOKENIZER = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(SPM_MODEL)]


def preprocess(source, prefix):
    preprocess_data_nmt.main(["--input", str(source), "--output-prefix", str(prefix), *TOKENIZER])


def test_every_line_is_a_document_of_one_sequence(tmp_path):
    lines = ["Guten Tag .", '{"text": "no JSON"}', "end"]
    source = tmp_path / "train.de"
    source.write_text("\n".join(lines) + "\n")
    preprocess(source, tmp_path / "out")
    dataset = IndexedDataset(str(tmp_path / "out"))
    spec = TokenizerSpec(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(SPM_MODEL))
    tokenizer = create_tokenizer(spec)
    assert [row.tolist() for row in dataset[:]] == [tokenizer.tokenize(line) for line in lines]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]


def test_an_empty_line_would_part_the_two_sides_and_is_an_error(tmp_path):
    source = tmp_path / "train.de"
    source.write_text("a\n\nb\n")
    with pytest.raises(DataError, match="train.de, line 2: the line is empty"):
        preprocess(source, tmp_path / "out")


def test_the_defaults_are_the_references():
    args = preprocess_data_nmt.get_parser().parse_args(["--input", "i", "--output-prefix", "o"])
    assert (args.workers, args.log_interval) == (1, 100)
