"""Inputs that are no text: Parquet is read, other kinds are refused by name."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import pickle
import re
import tarfile
import zipfile

import numpy as np
import pytest

from megatron.core import optional
from megatron.core.config.errors import ConfigError, DataError, MissingDependency
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.preprocess.documents import RecordFormat, find_inputs, read_documents
from tests.support.tokenizer_files import SPM_MODEL
from tools import preprocess_data

LINES = b'{"text": "hello"}\n' * 50


def archive(kind):
    data = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(data, "w") as file:
            file.writestr("a.jsonl", LINES)
    else:
        with tarfile.open(fileobj=data, mode="w") as file:
            info = tarfile.TarInfo("a.jsonl")
            info.size = len(LINES)
            file.addfile(info, io.BytesIO(LINES))
    return data.getvalue()


def numpy_array():
    data = io.BytesIO()
    np.save(data, np.arange(4))
    return data.getvalue()


KINDS = {
    "gzip": gzip.compress(LINES),
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(20),
    "xz": lzma.compress(LINES),
    "zip": archive("zip"),
    "tar": archive("tar"),
    "Arrow": b"ARROW1\0\0" + bytes(20),
    "numpy": numpy_array(),
    "pickle": pickle.dumps(["hello"]),
    "UTF-16": LINES.decode().encode("utf-16"),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_a_binary_file_is_refused_with_its_first_bytes(tmp_path, name, kind):
    (tmp_path / name).write_bytes(KINDS[kind])
    begin = re.escape(repr(KINDS[kind][:8]))
    with pytest.raises(DataError, match=rf"^--input .*{name} is binary \(it begins with {begin}"):
        find_inputs(str(tmp_path / name))


def test_an_archive_inside_gzip_is_refused_too(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(archive("tar")))
    with pytest.raises(DataError, match="a.json.gz is binary inside .gz .*: extract or convert it"):
        find_inputs(str(tmp_path / "*"))


@pytest.mark.parametrize("text", [b"PAR1 is a text", b"PK, BZh91 and ORC\n", b"PAR1", b"", b"7z\n"])
def test_text_that_begins_like_a_signature_is_text(tmp_path, text):
    (tmp_path / "a.txt").write_bytes(text)
    found = [texts["text"] for _, texts in read_documents(str(tmp_path / "a.txt"), RecordFormat())]
    assert "".join(text for texts in found for text in texts) == text.decode().strip()


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(optional, "why_missing", lambda package: f"{package} is not installed")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    wanted = r"a.parquet is a Parquet file: pyarrow is not installed; pip install .*\[data\]"
    with pytest.raises(MissingDependency, match=wanted):
        find_inputs(str(tmp_path / "a.parquet"))


ROWS = [{"text": f"hello {i}\nworld \u00e9\U0001f600", "id": i} for i in range(3000)]


@pytest.fixture
def parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    module = pytest.importorskip("pyarrow.parquet")

    def write(name, rows=ROWS, **more):
        module.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name, **more)
        return str(tmp_path / name)

    return write


def preprocess(source, output, *more):
    words = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(SPM_MODEL)]
    words += ["--input", source, "--output-prefix", str(output), "--workers", "2", *more]
    preprocess_data.main(words)


@pytest.mark.feature("Preprocessing: Parquet input, text columns named by --json-keys")
@pytest.mark.parametrize(
    "more",
    [(), ("--partitions", "2"), ("--partitions", "3", "--keep-sequential-samples")],
)
def test_parquet_gives_the_tokens_of_the_same_json_lines(tmp_path, parquet, more):
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    preprocess(str(lines), tmp_path / "wanted", *more)
    # Rows lie in several row groups.
    preprocess(parquet("in.parquet", row_group_size=700), tmp_path / "found", *more)
    wanted, found = (
        IndexedDataset(str(tmp_path / f"{n}_text_document")) for n in ("wanted", "found")
    )
    assert len(wanted) == len(ROWS)
    assert [s.tolist() for s in wanted[:]] == [s.tolist() for s in found[:]]


def test_columns_of_text_and_of_lists_of_text_are_read(tmp_path, parquet):
    rows = [{"title": "a", "parts": ["b", "c"], "n": 1, "when": b"x"}, {"title": "d", "parts": []}]
    record_format = RecordFormat(json_keys=("title", "parts"))
    ((_, texts),) = read_documents(parquet("in.parquet", rows), record_format)
    assert texts == {"title": ["a", "d"], "parts": [["b", "c"], []]}


def test_rows_that_cannot_be_used_are_named(tmp_path, parquet):
    rows = [*ROWS[:1500], {"text": None, "id": 1}, *ROWS[:10]]
    with pytest.raises(DataError, match=r"in\.parquet, line 1501: the value is NoneType"):
        list(read_documents(parquet("in.parquet", rows), RecordFormat()))
    wanted = r"line 1: the record has no key 'id'; name it with --json-keys"
    with pytest.raises(DataError, match=wanted):
        list(read_documents(parquet("in.parquet"), RecordFormat(json_keys=("id",))))
    (tmp_path / "in.parquet").write_bytes((tmp_path / "in.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match="in.parquet is damaged after row 0: .*; copy it again"):
        list(read_documents(str(tmp_path / "in.parquet"), RecordFormat()))
    with pytest.raises(DataError, match=r"has no column of text .*: its columns are n \(int64\)"):
        list(read_documents(parquet("n.parquet", [{"n": 1}]), RecordFormat()))


def test_parquet_is_not_read_as_plain_text(tmp_path, parquet):
    path = parquet("in.parquet")
    with pytest.raises(
        ConfigError, match="in.parquet is Parquet, not text: use --input-format jsonl"
    ):
        preprocess(path, tmp_path / "out", "--input-format", "text")
    with pytest.raises(DataError, match="in.txt is binary .* b'PAR1.* Parquet .parquet"):
        list(read_documents(parquet("in.txt"), RecordFormat()))


def test_damaged_parquet_is_told(tmp_path, parquet):
    path = parquet("in.parquet", row_group_size=700)
    whole = (tmp_path / "in.parquet").read_bytes()
    for at in (8, 300, len(whole) // 2, len(whole) - 10):
        data = bytearray(whole)
        data[at : at + 8] = b"\xff" * 8
        (tmp_path / "in.parquet").write_bytes(data)
        try:
            list(read_documents(path, RecordFormat()))
        except DataError as error:
            assert "in.parquet" in str(error)  # noqa: PT017
