"""Checksums beside token files: flipped bits are found, stale checksums are told apart."""

from __future__ import annotations

import logging
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets import indexed_dataset, indexed_format
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.datasets.indexed_format import Checksums, get_crc_path
from tests.support.dataset_files import numbered, write
from tools import verify_data

FLIPS = 100


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """100 documents of 37 tokens in 8 blocks of 1000 bytes."""
    for module in (indexed_dataset, indexed_format):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(indexed_format, "_READ_BYTES", 3000)
    monkeypatch.setattr(verify_data, "BLOCK_BYTES", 1000)
    return write(tmp_path / "data", numbered([37] * 100))


def flip(path: str, bit: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    Path(path).write_bytes(data)


def flips(path: str) -> list[int]:
    return random.Random(1).sample(range(8 * os.path.getsize(path)), FLIPS)


def read_all(prefix: str) -> None:
    data = IndexedDataset(prefix, verify_data=True)
    for i in range(len(data)):
        data.get(i)


@pytest.mark.feature("Data: --verify-data refuses .bin files with flipped bits")
def test_every_flipped_bit_of_bin_is_refused_when_it_is_read(prefix: str) -> None:
    read_all(prefix)
    path = get_bin_path(prefix)
    for bit in flips(path):
        flip(path, bit)
        start = bit // 8 // 1000 * 1000
        place = f"bytes {start} to {min(start + 1000, 7400)}"
        where = rf"data\.bin, {place}: the checksum does not match .*\.crc"
        with pytest.raises(DataError, match=where):
            read_all(prefix)
        flip(path, bit)
    read_all(prefix)


@pytest.mark.parametrize("path", [get_idx_path, get_crc_path])
def test_every_flipped_bit_of_idx_and_crc_is_refused_at_opening(prefix: str, path) -> None:  # noqa: ANN001
    for bit in flips(path(prefix)):
        flip(path(prefix), bit)
        with pytest.raises(DataError):
            IndexedDataset(prefix)
        flip(path(prefix), bit)
    IndexedDataset(prefix)


def test_only_the_blocks_that_are_read_are_verified_and_each_once(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(get_bin_path(prefix), 8 * 5500)
    verified = []
    real = IndexedDataset._verify

    def note(self: IndexedDataset, checksums: Checksums, block: int) -> None:
        verified.append(block)
        real(self, checksums, block)

    monkeypatch.setattr(IndexedDataset, "_verify", note)
    data = pickle.loads(pickle.dumps(IndexedDataset(prefix, verify_data=True)))
    assert data.verify_data
    assert data[13].tolist() == list(range(1 + 13 * 37, 1 + 14 * 37))  # bytes 962 to 1036
    assert [len(s) for s in data[13:15]] == [37, 37]
    assert verified == [0, 1]
    with pytest.raises(DataError, match=r"bytes 5000 to 6000"):
        data[10:80]


def test_without_the_flag_bin_is_not_verified(prefix: str) -> None:
    flip(get_bin_path(prefix), 0)
    assert IndexedDataset(prefix)[0].tolist() == [0, *range(2, 38)]


def test_data_without_checksums_is_read_and_the_flag_says_so_once(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.remove(get_crc_path(prefix))
    with caplog.at_level(logging.INFO):
        IndexedDataset(prefix)
        assert caplog.text == ""
        read_all(prefix)
        read_all(prefix)
    assert caplog.text.count("has no checksums: write them with python tools/verify_data.py") == 1


def test_stale_checksums_are_refused_with_the_command_that_writes_them(prefix: str) -> None:
    crc = Path(get_crc_path(prefix)).read_bytes()
    cure = r"write the checksums again: python tools/verify_data\.py --write .*data\)"
    for lengths, wrong in (
        ([37] * 99, r"the size of .bin and .idx, \(7326, .*\), not \(7400, .*\), does not match"),
        ([36, 38, *[37] * 98], r"data\.idx: the checksum does not match"),  # the same sizes
    ):
        write(prefix, numbered(lengths))
        Path(get_crc_path(prefix)).write_bytes(crc)
        with pytest.raises(DataError, match=f"{wrong} .*data.crc: .*{cure}"):
            IndexedDataset(prefix)


def test_what_the_builder_writes_in_one_pass_is_what_the_files_give(
    prefix: str, tmp_path: Path
) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "many.bin"), np.int32)
    for length in (0, 1, 249, 250, 3000, 7):
        builder.add_document([5] * length, [length] if length else [])
    builder.add_documents(np.arange(900), [300, 600], [1, 0, 1])
    builder.finalize(str(tmp_path / "many.idx"))
    merged = IndexedDatasetBuilder(str(tmp_path / "merged.bin"), np.uint16)
    merged.add_index(prefix)
    merged.add_index(prefix)
    merged.finalize(str(tmp_path / "merged.idx"))
    for name in ("data", "many", "merged"):
        written, computed = (f(str(tmp_path / name)) for f in (Checksums.read, Checksums.of_files))
        assert written is not None
        assert written.blocks.tolist() == computed.blocks.tolist()
        assert written.idx_checksum == computed.idx_checksum
        assert (written.bin_bytes, written.idx_bytes) == (computed.bin_bytes, computed.idx_bytes)


def test_damaged_data_is_not_merged(prefix: str, tmp_path: Path) -> None:
    flip(get_bin_path(prefix), 8 * 4321)
    with pytest.raises(DataError, match=r"data\.bin, bytes 4000 to 5000: the checksum"):
        IndexedDatasetBuilder(str(tmp_path / "merged.bin"), np.uint16).add_index(prefix)


class TestTool:
    def run(self, *words: str) -> tuple[int, str]:
        try:
            verify_data.main(list(words))
        except DataError as error:
            return 1, str(error)
        return 0, ""

    def test_it_reports_damaged_blocks_and_their_documents(
        self, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = write(tmp_path / "other", numbered([2, 3]))
        assert self.run(prefix, other) == (0, "")
        for byte in (2500, 2501, 7399):
            flip(get_bin_path(prefix), 8 * byte)
        capsys.readouterr()
        assert self.run(prefix, other) == (1, "1 of 2 data sets failed")
        bin_path = get_bin_path(prefix)
        assert capsys.readouterr().out.splitlines() == [
            f"{bin_path}, bytes 2000 to 3000, is damaged: documents 27 to 40 (sequences 27 to 40)",
            f"{bin_path}, bytes 7000 to 7400, is damaged: documents 94 to 99 (sequences 94 to 99)",
            f"{other}: intact",
        ]

    def test_a_damaged_index_does_not_hide_damaged_tokens(
        self, prefix: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flip(get_bin_path(prefix), 0)
        flip(get_idx_path(prefix), 8 * 100)
        assert self.run(prefix)[0] == 1
        lines = capsys.readouterr().out.splitlines()
        assert "data.idx: the checksum does not match" in lines[0]
        assert lines[1] == f"{get_bin_path(prefix)}, bytes 0 to 1000, is damaged"

    def test_it_writes_missing_checksums_and_refuses_wrong_structure(
        self, prefix: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        os.remove(get_crc_path(prefix))
        assert self.run(prefix)[0] == 1
        assert "no checksums (" in capsys.readouterr().out
        assert self.run("--write", prefix) == (0, "")
        assert self.run(prefix) == (0, "")
        os.truncate(get_bin_path(prefix), 7000)
        capsys.readouterr()
        assert self.run("--write", prefix)[0] == 1
        assert "points up to byte 7400" in capsys.readouterr().out

    def test_missing_files_are_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(str(tmp_path / "none"))[0] == 1
        assert self.run("--write", str(tmp_path / "none"))[0] == 1
        assert "none.idx: No such file" in capsys.readouterr().out


def test_documents_of_several_sequences_and_gaps_are_found(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), np.uint8)
    builder.add_document([1] * 10, [4, 6])
    builder.add_document([], [])
    builder.add_document([1] * 10, [10])
    builder.finalize(str(tmp_path / "d.idx"))
    index = IndexedDataset(str(tmp_path / "d")).index
    assert verify_data.documents_in(index, 4, 10) == "documents 0 to 0 (sequences 1 to 1)"
    assert verify_data.documents_in(index, 9, 11) == "documents 0 to 2 (sequences 1 to 2)"
    assert verify_data.documents_in(index, 20, 30) == "no document"
