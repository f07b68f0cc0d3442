"""Blocks hold whole records, whatever their size and the file's form."""

from __future__ import annotations

import gzip
import random

import pytest

from megatron.training.preprocess.documents import (
    LINE,
    SEPARATORS,
    RecordFormat,
    blocks,
    pieces,
)
from megatron.training.preprocess.run import Manifest


def random_text(rng):
    parts = ["a", "bb", "c\u00e9", " ", "\n", "\n", "\n\n", "\n \n", "\r\n", "long" * 20]
    return "".join(rng.choice(parts) for _ in range(rng.randint(0, 200)))


@pytest.mark.parametrize("sample_by", ["line", "paragraph", "document"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_records_do_not_depend_on_the_size_of_blocks(tmp_path, sample_by, suffix):
    rng = random.Random(0)
    record_format = RecordFormat(sample_by=sample_by, plain_text=True)
    path = tmp_path / f"in.txt{suffix}"
    for _ in range(30):
        data = random_text(rng).encode()
        path.write_bytes(gzip.compress(data) if suffix else data)
        separator = SEPARATORS[sample_by]
        whole = [block.read() for block in blocks([str(path)], separator, 1 << 20)]
        assert b"".join(whole) == data
        wanted = None
        for num_bytes in (1 << 20, 1, 7, 64):
            cut = list(blocks([str(path)], separator, num_bytes))
            texts = [t for block in cut for t in record_format.texts(block)["text"]]
            wanted = texts if wanted is None else wanted
            assert texts == wanted
            assert sum(block.end - block.start for block in cut) == len(data)


def test_the_bytes_on_disk_of_all_blocks_are_those_of_the_file(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' * 50_000))
    cut = list(blocks([str(path)], LINE, 1000))
    assert len(cut) > 100
    assert sum(block.stored_bytes for block in cut) == path.stat().st_size


def test_frames_of_zstandard_are_read_in_pieces_of_any_size(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    path = str(tmp_path / "in.zst")
    with open(path, "wb") as file:
        for part in (b"abc" * 1000, b"", b"def" * 1000):
            file.write(zstandard.compress(part))
    for num_bytes in (1, 1000, 1 << 20):
        found = [piece for piece, _ in pieces(path, num_bytes)]
        assert b"".join(found) == b"abc" * 1000 + b"def" * 1000


def test_the_kind_of_a_file_is_in_the_name_below_its_compression():
    record_format = RecordFormat()
    assert record_format.is_plain("a.txt.zst")
    assert not record_format.is_plain("a.gz")
    assert RecordFormat(plain_text=False).separator("a.txt") is LINE


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", '{"key": {"a": 1}}', '{"key": {"a": 1}, "dealt": 1, "finished": 2}'],
)
def test_a_damaged_record_of_finished_partitions_is_none(tmp_path, content):
    path = tmp_path / "out.partitions.json"
    path.write_text(content)
    manifest = Manifest(str(path), {"a": 1})
    assert (manifest.dealt, manifest.finished) == (False, set())
    manifest.finished.add(1)
    manifest.write()
    assert Manifest(str(path), {"a": 1}).finished == {1}
    assert Manifest(str(path), {"a": 2}).finished == set()
