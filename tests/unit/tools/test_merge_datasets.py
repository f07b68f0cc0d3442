"""merge_datasets.py: the parts in a row, equal to preprocessing them in a row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.training.tokenizer.fingerprint import Fingerprint, read_fingerprint
from tools import merge_datasets


def write(prefix, documents, dtype=np.uint16, modes=None):
    """One part; with ``modes`` a multimodal one."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype, modes is not None)
    for index, tokens in enumerate(documents):
        builder.add_document(tokens, [len(tokens)] if tokens else [], modes and [modes[index]])
    builder.finalize(f"{prefix}.idx")


def merge(directory, prefix, *flags):
    merge_datasets.main(["--input", str(directory), "--output-prefix", str(prefix), *flags])


def contents(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def parts(tmp_path):
    directory = tmp_path / "parts"
    directory.mkdir()
    write(directory / "b", [[4], [], [5, 6]])
    write(directory / "a", [[1, 2, 3]])
    write(directory / "c", [])
    (directory / "notes.md").write_text("not a part")
    return directory


def test_the_result_is_all_documents_sorted_by_the_name_of_their_part(parts, tmp_path):
    merge(parts, tmp_path / "out")
    write(tmp_path / "wanted", [[1, 2, 3], [4], [], [5, 6]])
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


def test_modes_are_kept_with_multimodal(tmp_path):
    directory = tmp_path / "parts"
    directory.mkdir()
    write(directory / "a", [[1], [2]], np.int32, [0, 1])
    write(directory / "b", [[3]], np.int32, [1])
    merge(directory, tmp_path / "out", "--multimodal")
    dataset = IndexedDataset(str(tmp_path / "out"), multimodal=True)
    assert dataset.sequence_modes.tolist() == [0, 1, 1]


def test_the_tokenizer_is_carried_over_if_all_parts_agree(parts, tmp_path):
    one = Fingerprint("NullTokenizer", 10, 9, "aa")
    for name in "ab":
        one.write(str(parts / name))
    merge(parts, tmp_path / "out")
    assert read_fingerprint(str(tmp_path / "out")) is None  # c does not say
    one.write(str(parts / "c"))
    merge(parts, tmp_path / "out")
    assert read_fingerprint(str(tmp_path / "out")) == one
    Fingerprint("NullTokenizer", 10, 9, "bb").write(str(parts / "c"))
    with pytest.raises(DataError, match="ids of two tokenizers do not mix"):
        merge(parts, tmp_path / "out")


def test_what_cannot_be_merged_is_said_with_the_file(parts, tmp_path):
    with pytest.raises(ConfigError, match="--input .*none is no directory"):
        merge(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ConfigError, match="--output-prefix .*its directory does not exist"):
        merge(parts, tmp_path / "none" / "out")
    with pytest.raises(ConfigError, match="is one of the files in --input"):
        merge(parts, parts / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no .bin and .idx"):
        merge(tmp_path / "empty", tmp_path / "out")
    write(parts / "d", [[70_000]], np.int32)
    with pytest.raises(DataError, match="merge files of one token type"):
        merge(parts, tmp_path / "out")
    (parts / "d.idx").unlink()
    with pytest.raises(DataError, match="d.idx is missing, the .bin is there"):
        merge(parts, tmp_path / "out")
