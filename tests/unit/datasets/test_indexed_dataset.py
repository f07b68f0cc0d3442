"""The .bin/.idx pair: bytes, readers, and what is refused when it is opened."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.config.errors import DataError
from megatron.core.datasets import indexed_dataset
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.datasets.indexed_format import get_crc_path
from tests.support.dataset_files import GOLDEN_PREFIX, numbered, write


def same_files(first: str, second: str) -> bool:
    return all(
        Path(path(first)).read_bytes() == Path(path(second)).read_bytes()
        for path in (get_bin_path, get_idx_path)
    )


def build(prefix: str, dtype: type = np.uint16, multimodal: bool = False) -> IndexedDatasetBuilder:
    return IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)


@pytest.fixture
def golden() -> IndexedDataset:
    return IndexedDataset(GOLDEN_PREFIX)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return str(tmp_path / "data")


class TestBytes:
    def test_items_make_the_known_files(self, golden: IndexedDataset, prefix: str) -> None:
        builder = build(prefix)
        for i in range(len(golden)):
            builder.add_item(torch.tensor(golden[i].tolist()))
            builder.end_document()
        builder.finalize(get_idx_path(prefix))
        assert same_files(prefix, GOLDEN_PREFIX)

    @pytest.mark.feature(
        "Data: .bin/.idx files equal to Megatron-LM's byte for byte, read by mmap or plain reads"
    )
    def test_documents_make_the_known_files(self, golden: IndexedDataset, prefix: str) -> None:
        builder = build(prefix)
        for sequence in golden[:]:
            builder.add_document(sequence.tolist(), [len(sequence)])
        builder.finalize(get_idx_path(prefix))
        assert same_files(prefix, GOLDEN_PREFIX)

    def test_many_documents_at_once_make_the_known_files(
        self, golden: IndexedDataset, prefix: str
    ) -> None:
        builder = build(prefix)
        for part in (slice(0, 100), slice(100, 420)):
            sequences = golden[part]
            lengths = [len(s) for s in sequences]
            builder.add_documents(np.concatenate(sequences), lengths, [1] * len(lengths))
        builder.finalize(get_idx_path(prefix))
        assert same_files(prefix, GOLDEN_PREFIX)

    def test_merged_parts_make_the_known_files(
        self, golden: IndexedDataset, tmp_path: Path
    ) -> None:
        parts = [
            write(tmp_path / "a", [s.tolist() for s in golden[:33]]),
            write(tmp_path / "b", [s.tolist() for s in golden[33:]]),
        ]
        builder = build(str(tmp_path / "merged"))
        for part in parts:
            builder.add_index(part)
        builder.finalize(str(tmp_path / "merged.idx"))
        assert same_files(str(tmp_path / "merged"), GOLDEN_PREFIX)

    def test_index_arrays_that_spill_to_disk_make_the_known_files(
        self, golden: IndexedDataset, prefix: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(indexed_dataset, "_SPOOL_BYTES", 100)
        monkeypatch.setattr(indexed_dataset, "CHUNK", 7)
        builder = build(prefix)
        builder.add_index(GOLDEN_PREFIX)
        builder.finalize(get_idx_path(prefix))
        assert same_files(prefix, GOLDEN_PREFIX)

    def test_header_and_arrays_lie_where_the_format_says(self, prefix: str) -> None:
        builder = build(prefix, np.int32)
        builder.add_document([5, 6, 7], [1, 2])
        builder.add_document([], [])
        builder.finalize(get_idx_path(prefix))
        expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3)
        expected += struct.pack("<2i", 1, 2) + struct.pack("<2q", 0, 4)
        expected += struct.pack("<3q", 0, 2, 2)
        assert Path(get_idx_path(prefix)).read_bytes() == expected
        assert Path(get_bin_path(prefix)).read_bytes() == struct.pack("<3i", 5, 6, 7)

    def test_a_document_without_tokens_repeats_an_index_entry(self, prefix: str) -> None:
        builder = build(prefix)
        builder.add_documents([1, 2, 3], [2, 1], [1, 0, 1])
        builder.finalize(get_idx_path(prefix))
        assert IndexedDataset(prefix).document_indices.tolist() == [0, 1, 1, 2]
        assert IndexedDataset(prefix).sequence_lengths.tolist() == [2, 1]

    def test_modes_follow_the_document_index(self, prefix: str) -> None:
        builder = build(prefix, np.int32, multimodal=True)
        builder.add_item([1, 2], mode=0)
        builder.add_item([3], mode=1)
        builder.end_document()
        builder.add_document([4, 5], [1, 1], modes=[0, 1])
        builder.finalize(get_idx_path(prefix))
        assert Path(get_idx_path(prefix)).read_bytes()[-4:] == bytes([0, 1, 0, 1])

    @pytest.mark.parametrize("member", list(DType))
    def test_every_token_type_survives(self, prefix: str, member: DType) -> None:
        dtype = np.dtype(member.name)
        write(prefix, [[1, 2, 3], [4]], dtype)
        read = IndexedDataset(prefix)
        assert [s.tolist() for s in read[:]] == [[1, 2, 3], [4]]
        assert read[0].dtype == dtype
        assert DType.size(member.value) == DType.size(dtype) == dtype.itemsize

    def test_small_vocabularies_take_two_bytes(self) -> None:
        assert DType.optimal_dtype(65499) is np.uint16
        assert DType.optimal_dtype(65500) is np.int32
        assert DType.optimal_dtype(None) is np.int32


class TestReading:
    @pytest.mark.parametrize("mmap", [True, False])
    def test_parts_and_slices(self, prefix: str, mmap: bool) -> None:
        documents = numbered([3, 1, 4, 1, 5])
        write(prefix, documents)
        data = IndexedDataset(prefix, mmap=mmap)
        assert len(data) == 5
        assert data[2].tolist() == documents[2]
        assert data[-1].tolist() == documents[-1]
        assert data.get(4, offset=1, length=2).tolist() == documents[4][1:3]
        assert data.get(4, offset=2).tolist() == documents[4][2:]
        assert [s.tolist() for s in data[1:4]] == documents[1:4]
        assert data[3:3] == []
        with pytest.raises(ValueError, match="step 1"):
            data[::2]

    def test_modes_come_with_sequences(self, prefix: str) -> None:
        builder = build(prefix, np.int32, multimodal=True)
        builder.add_document([1, 2, 3], [2, 1], modes=[0, 1])
        builder.finalize(get_idx_path(prefix))
        data = IndexedDataset(prefix, multimodal=True)
        sequence, mode = data[1]
        assert (sequence.tolist(), mode) == ([3], 1)
        sequences, modes = data[0:2]
        assert ([s.tolist() for s in sequences], modes.tolist()) == ([[1, 2], [3]], [0, 1])
        assert data.sequence_modes is not None

    @pytest.mark.parametrize("mmap", [True, False])
    def test_a_pickled_dataset_reads_the_same(self, prefix: str, mmap: bool) -> None:
        write(prefix, numbered([3, 2]))
        copy = pickle.loads(pickle.dumps(IndexedDataset(prefix, mmap=mmap)))
        assert copy[1].tolist() == [4, 5]
        assert copy.mmap == mmap

    def test_the_document_index_can_be_replaced_for_reading(self, prefix: str) -> None:
        data = IndexedDataset(write(prefix, numbered([1, 1])))
        data.set_document_indices(np.array([0, 2]))
        assert data.get_document_indices().tolist() == [0, 2]

    def test_a_pair_exists_when_both_files_do(self, prefix: str) -> None:
        assert not IndexedDataset.exists(prefix)
        write(prefix, [[1]])
        assert IndexedDataset.exists(prefix)

    def test_a_dataset_without_tokens_opens(self, prefix: str) -> None:
        write(prefix, [[], []])
        assert len(IndexedDataset(prefix)) == 0


class TestDamage:
    def damage(self, prefix: str, at: int, data: bytes) -> None:
        write(prefix, numbered([3, 2]), np.int32)
        index = bytearray(Path(get_idx_path(prefix)).read_bytes())
        index[at : at + len(data)] = data
        Path(get_idx_path(prefix)).write_bytes(index)

    @pytest.mark.parametrize(
        ("at", "data", "message"),
        [
            (0, b"NOTANIDX\x00", "no index file"),
            (9, struct.pack("<Q", 2), "format version 2, only 1"),
            (17, b"\x09", "token type code 9"),
            (18, struct.pack("<Q", 99), "its header asks for"),
            (34, struct.pack("<i", -1), "negative length or pointer"),
            (34, struct.pack("<i", 99), "sequences 0 and 1 overlap"),
            (42, struct.pack("<q", 99), "overlap in .bin"),
            (58, struct.pack("<q", 1), "must run from 0 to 2, found"),
            (66, struct.pack("<q", 9), "document index must never fall"),
            (74, struct.pack("<q", 7), r"must run from 0 to 2, found \[0\] to \[7\]"),
            (9, struct.pack("<Q", 2**64 - 1), "only 1 is known"),
            (17, b"\x00", "token type code 0"),
            (17, b"\xff", "token type code 255"),
            (18, struct.pack("<Q", 2**64 - 1), "its header asks for"),
            (18, struct.pack("<Q", 2**63), "its header asks for"),
            (26, struct.pack("<Q", 2**64 - 1), "its header asks for"),
            (26, struct.pack("<Q", 0), "must run from 0 to 2, found"),
            (18, struct.pack("<QQ", 0, 0), "must run from 0 to 0, found"),
            (18, struct.pack("<Q", 1), "must run from 0 to 1, found"),
            (34, struct.pack("<2i", -(2**31), -(2**31)), "negative length or pointer"),
            (38, struct.pack("<i", 2**31 - 1), "has 20 bytes, but .* points up to byte 8589934600"),
            (34, struct.pack("<i", 4), "sequences 0 and 1 overlap"),
            (42, struct.pack("<q", -1), "negative length or pointer"),
            (42, struct.pack("<2q", -(2**63), 2**63 - 1), "negative length or pointer"),
            (50, struct.pack("<q", 2**63 - 1), "has 20 bytes, but .* byte 9223372036854775815"),
            (50, struct.pack("<q", 2**63 - 8), "has 20 bytes, but .* byte 9223372036854775808"),
            (42, struct.pack("<2q", 2**63 - 4, 2**63 - 4), "has 20 bytes, but"),
            (50, struct.pack("<q", 21), "has 20 bytes, but .* byte 29"),
            (50, struct.pack("<q", 11), "sequences 0 and 1 overlap"),
            (66, struct.pack("<q", 2**63 - 1), "document index must never fall"),
            (66, struct.pack("<q", -(2**63)), "document index must never fall"),
        ],
    )
    def test_a_wrong_index_is_refused(
        self, prefix: str, at: int, data: bytes, message: str
    ) -> None:
        self.damage(prefix, at, data)
        with pytest.raises(DataError, match=message) as caught:
            IndexedDataset(prefix)
        assert get_idx_path(prefix) in str(caught.value)

    @pytest.mark.parametrize("num_bytes", [0, 33, 60])
    def test_a_short_index_is_refused(self, prefix: str, num_bytes: int) -> None:
        write(prefix, numbered([3, 2]))
        index = Path(get_idx_path(prefix))
        index.write_bytes(index.read_bytes()[:num_bytes])
        with pytest.raises(DataError, match="cut short"):
            IndexedDataset(prefix)

    def test_a_short_token_file_is_refused(self, prefix: str) -> None:
        write(prefix, numbered([3, 2]))
        tokens = Path(get_bin_path(prefix))
        tokens.write_bytes(tokens.read_bytes()[:-1])
        with pytest.raises(DataError, match=r"data\.bin has 9 bytes, but .* up to byte 10"):
            IndexedDataset(prefix)

    @pytest.mark.parametrize("mmap", [True, False])
    def test_a_token_file_cut_while_it_is_read_is_told(self, prefix: str, mmap: bool) -> None:
        data = IndexedDataset(write(prefix, numbered([3, 2])), mmap=mmap)
        os.truncate(get_bin_path(prefix), 2)
        with pytest.raises(DataError, match=r"data\.bin ends at byte 2: .* cut short after"):
            data[0]

    def test_an_index_cut_while_it_is_read_is_told(self, prefix: str) -> None:
        data = IndexedDataset(write(prefix, numbered([1] * 2000)))
        os.truncate(get_idx_path(prefix), 5000)
        for read in (
            lambda: data[1500],
            lambda: data[3:5],
            lambda: data.sequence_lengths,
            lambda: data.document_indices,
            lambda: data.get_document_indices(),
            lambda: data.index.check_arrays("bin", 1 << 20),
        ):
            with pytest.raises(DataError, match=r"data\.idx had .* and has 5000 now"):
                read()

    def test_a_missing_file_is_named_with_the_cure(self, prefix: str) -> None:
        with pytest.raises(DataError, match=r"data\.bin: No such file.*without \.bin or \.idx"):
            IndexedDataset(prefix)
        text = Path(prefix).with_name("text.jsonl")
        text.write_text("{}")
        with pytest.raises(DataError, match=r"text\.jsonl is a file, .* tools/preprocess_data\.py"):
            IndexedDataset(str(text))
        with pytest.raises(DataError, match="embedded null byte; a data path is named without"):
            IndexedDataset(prefix + "\0")
        Path(get_bin_path(prefix)).touch()
        with pytest.raises(DataError, match=r"data\.idx: No such file.*without \.bin or \.idx"):
            IndexedDataset(prefix)


class TestWriting:
    def test_nothing_is_visible_before_the_end(self, prefix: str, tmp_path: Path) -> None:
        builder = build(prefix)
        builder.add_documents([1, 2], [1, 1], [1, 1])
        assert not Path(get_bin_path(prefix)).exists()
        builder.finalize(get_idx_path(prefix))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["data.bin", "data.crc", "data.idx"]

    def test_a_killed_writer_leaves_the_old_pair_whole(self, prefix: str) -> None:
        write(prefix, [[1, 2]])
        build(prefix).add_document([9] * 100, [100])
        assert IndexedDataset(prefix)[0].tolist() == [1, 2]

    def test_ids_that_do_not_fit_are_refused(self, prefix: str) -> None:
        builder = build(prefix, np.uint16)
        with pytest.raises(DataError, match=r"data\.bin: token ids 7 to 65536 do not fit uint16"):
            builder.add_item([7, 65536])
        with pytest.raises(DataError, match="-1 to 3 do not fit"):
            builder.add_document(np.array([3, -1]), [2])

    def test_sequences_without_a_document_are_a_mistake(self, prefix: str) -> None:
        builder = build(prefix)
        builder.add_item([1])
        with pytest.raises(AssertionError, match="1 sequences follow"):
            builder.finalize(get_idx_path(prefix))

    def test_lengths_must_cover_the_tokens(self, prefix: str) -> None:
        builder = build(prefix)
        with pytest.raises(AssertionError, match="3 tokens"):
            builder.add_document([1, 2, 3], [2])
        with pytest.raises(AssertionError, match="3 tokens"):
            builder.add_documents([1, 2, 3], [2], [1])

    def test_merging_different_token_types_is_refused(self, tmp_path: Path) -> None:
        part = write(tmp_path / "part", [[1]], np.int32)
        with pytest.raises(DataError, match="holds int32 tokens, the files before it uint16"):
            build(str(tmp_path / "merged")).add_index(part)

    def test_merging_a_file_with_gaps_is_refused(self, tmp_path: Path) -> None:
        part = write(tmp_path / "part", [[1]])
        with open(get_bin_path(part), "ab") as file:
            file.write(b"\x00\x00")
        os.remove(get_crc_path(part))
        with pytest.raises(DataError, match="has 4 bytes, its index names 2"):
            build(str(tmp_path / "merged")).add_index(part)

    def test_merging_half_a_pair_is_refused(self, tmp_path: Path) -> None:
        part = write(tmp_path / "part", [[1]])
        Path(get_bin_path(part)).unlink()
        with pytest.raises(DataError, match=r"part\.bin: No such file"):
            build(str(tmp_path / "merged")).add_index(part)


def test_reading_and_writing_load_no_torch() -> None:
    code = "import sys, megatron.core.datasets.indexed_dataset; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
