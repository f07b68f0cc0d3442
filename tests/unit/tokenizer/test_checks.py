"""Traps of tokenizers and token files stop a run before it starts."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.training.tokenizer import TokenizerSpec, create_tokenizer, fingerprint
from megatron.training.tokenizer.base import _NullTokenizer
from megatron.training.tokenizer.fingerprint import Fingerprint, read_fingerprint, sidecar_path
from tests.support.tokenizer_files import SPM_MODEL, write_bpe


class PadIsEod(_NullTokenizer):
    @property
    def pad(self):
        return self.eod


class NoEod(_NullTokenizer):
    @property
    def eod(self):
        raise self._missing("EOD")


def sentencepiece(kind="GPTSentencePieceTokenizer"):
    return create_tokenizer(TokenizerSpec(tokenizer_type=kind, tokenizer_model=str(SPM_MODEL)))


def write_data(prefix, documents, dtype=np.int32):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return IndexedDataset(str(prefix))


def test_an_absent_eod_is_named_with_the_flag_that_needs_it():
    with pytest.raises(ConfigError, match="--append-eod needs the id .* no EOD token"):
        fingerprint.check_eod(NoEod(10), "--append-eod")
    assert fingerprint.check_eod(_NullTokenizer(10), "--append-eod") == 10


def test_ids_beyond_the_padded_vocabulary_are_refused():
    with pytest.raises(ConfigError, match="--padded-vocab-size 10 is fewer than the 11 ids"):
        fingerprint.check_vocab(_NullTokenizer(10), 10)
    fingerprint.check_vocab(_NullTokenizer(10), 11)


def test_rows_that_tensor_parallel_ranks_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="size 2: give --padded-vocab-size 12"):
        fingerprint.check_vocab(_NullTokenizer(10), 11, tp=2)
    fingerprint.check_vocab(_NullTokenizer(10), 12, tp=2)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_every_type_of_token_file_is_checked(tmp_path, dtype):
    dataset = write_data(tmp_path / "data", [[1, 64], [], [0]], dtype)
    with pytest.raises(DataError, match="holds the id 64"):
        fingerprint.check_data_ids(dataset, 64)
    fingerprint.check_data_ids(dataset, 65)


def test_a_token_file_of_another_vocabulary_is_refused(tmp_path):
    dataset = write_data(tmp_path / "d", [[1, 2], [3, 64]])
    with pytest.raises(DataError, match="holds the id 64, the vocabulary has ids 0 to 63"):
        fingerprint.check_data_ids(dataset, 64)
    fingerprint.check_data_ids(dataset, 65)
    negative = write_data(tmp_path / "n", [[1, -2]])
    with pytest.raises(DataError, match="holds the id -2"):
        fingerprint.check_data_ids(negative, 64)


def test_flags_of_document_ends_need_an_eod_in_the_data(tmp_path):
    tokenizer = _NullTokenizer(10)
    without = write_data(tmp_path / "without", [[1, 2], [3, 4]])
    flags = ["--reset-position-ids", "--eod-mask-loss"]
    with pytest.raises(DataError, match="--reset-position-ids --eod-mask-loss act .*--append-eod"):
        fingerprint.check_data(without, tokenizer, 11, flags)
    fingerprint.check_data(without, tokenizer, 11)
    fingerprint.check_data(write_data(tmp_path / "with", [[1, 2], [3, 10]]), tokenizer, 11, flags)
    fingerprint.check_data_has_eod(without, 10, [])


def test_data_of_another_tokenizer_is_refused(tmp_path):
    dataset = write_data(tmp_path / "d", [[1, 2]])
    prefix = str(tmp_path / "d")
    fingerprint.check_same_tokenizer(prefix, sentencepiece())  # no sidecar: nothing is known
    Fingerprint.of(sentencepiece()).write(prefix)
    fingerprint.check_data(dataset, sentencepiece(), 512)
    with pytest.raises(DataError, match="was written with GPTSentencePieceTokenizer .512 ids"):
        fingerprint.check_data(dataset, sentencepiece("Llama2Tokenizer"), 512)
    fingerprint.check_same_tokenizer(prefix, _NullTokenizer(512))  # makes no claim on text


def test_the_fingerprint_is_of_what_a_tokenizer_does_not_of_its_files(tmp_path):
    directory = write_bpe(tmp_path, 400)
    gpt2 = create_tokenizer(
        TokenizerSpec(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(directory / "vocab.json"),
            merge_file=str(directory / "merges.txt"),
        )
    )
    hugging_face = create_tokenizer(
        TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(directory))
    )
    assert Fingerprint.of(gpt2).sha256 == Fingerprint.of(hugging_face).sha256
    other = write_bpe(tmp_path / "other", 401)
    larger = create_tokenizer(
        TokenizerSpec(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(other))
    )
    assert Fingerprint.of(larger).sha256 != Fingerprint.of(hugging_face).sha256


def test_the_sidecar_comes_back_as_written_and_a_damaged_one_is_an_error(tmp_path):
    prefix = str(tmp_path / "d")
    assert read_fingerprint(prefix) is None
    written = Fingerprint.of(sentencepiece())
    written.write(prefix)
    assert read_fingerprint(prefix) == written
    with open(sidecar_path(prefix), "w") as file:
        file.write('{"tokenizer": ')
    with pytest.raises(DataError, match=r"d\.tokenizer\.json: .*preprocess the data again"):
        read_fingerprint(prefix)
