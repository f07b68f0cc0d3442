"""Readers of s3:// and msc:// against clients that serve a local directory."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core import optional
from megatron.core.config.errors import DataError, MissingDependency
from megatron.core.datasets import object_storage_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.corpus import shard_prefix
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
from megatron.training.config.data import DataConfig
from megatron.training.preprocess.corpus import sources_of, tokenize
from megatron.training.tokenizer.base import TokenizerSpec
from megatron.training.tokenizer.tokenizer import create_tokenizer
from tests.support.dataset_files import config, numbered, write

DOCUMENTS = numbered([3, 5, 2, 7])


class FakeS3:
    """Objects are files under ``root``; every request is noted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[str] = []

    def client(self, service: str) -> FakeS3:
        assert service == "s3"
        return self

    def head_object(self, Bucket: str, Key: str) -> dict[str, int]:
        return {"ContentLength": (self.root / Bucket / Key).stat().st_size}

    def get_object(self, Bucket: str, Key: str, Range: str) -> dict[str, Any]:
        self.requests.append(Range)
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        return {"Body": io.BytesIO((self.root / Bucket / Key).read_bytes()[first : last + 1])}

    def download_file(self, bucket: str, key: str, path: str) -> None:
        self.requests.append("download")
        Path(path).write_bytes((self.root / bucket / key).read_bytes())


class FakeMSC:
    """The part of the Multi-Storage Client that is used, over files under ``root``."""

    types = SimpleNamespace(Range=lambda offset, size: SimpleNamespace(offset=offset, size=size))

    def __init__(self, root: Path) -> None:
        self.root = root

    def resolve_storage_client(self, url: str) -> tuple[FakeMSC, str]:
        return self, url.removeprefix("msc://")

    def info(self, path: str) -> Any:
        return SimpleNamespace(content_length=(self.root / path).stat().st_size)

    def read(self, path: str, byte_range: Any) -> bytes:
        data = (self.root / path).read_bytes()
        return data[byte_range.offset : byte_range.offset + byte_range.size]

    def download_file(self, url: str, path: str) -> None:
        Path(path).write_bytes((self.root / url.removeprefix("msc://")).read_bytes())


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    (tmp_path / "bucket").mkdir()
    write(tmp_path / "bucket" / "text", DOCUMENTS)
    fake = FakeS3(tmp_path)
    packages = {"boto3": fake, "multistorageclient": FakeMSC(tmp_path)}
    monkeypatch.setattr(object_storage_utils, "require", lambda package, _: packages[package])
    return fake


@pytest.mark.feature("Data: tokens from S3 and the Multi-Storage Client")
@pytest.mark.parametrize("scheme", ["s3", "msc"])
def test_the_tokens_are_those_of_the_local_file(s3: FakeS3, scheme: str, tmp_path: Path) -> None:
    storage = ObjectStorageConfig(str(tmp_path / "copies"))
    data = IndexedDataset(f"{scheme}://bucket/text", object_storage_config=storage)
    assert [s.tolist() for s in data[:]] == DOCUMENTS
    assert data.get(3, offset=2, length=3).tolist() == DOCUMENTS[3][2:5]
    assert (tmp_path / "copies/bucket/text.idx").exists()
    assert pickle.loads(pickle.dumps(data))[1].tolist() == DOCUMENTS[1]


def test_data_in_object_storage_is_read_unverified_and_says_so(
    s3: FakeS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = ObjectStorageConfig(str(tmp_path / "copies"))
    with caplog.at_level(logging.INFO):
        data = IndexedDataset("s3://bucket/text", object_storage_config=storage, verify_data=True)
    assert data[0].tolist() == DOCUMENTS[0]
    assert "s3://bucket/text has no checksums: those of data in object storage" in caplog.text


def test_neighbours_come_from_the_chunk_fetched_before(s3: FakeS3, tmp_path: Path) -> None:
    storage = ObjectStorageConfig(str(tmp_path / "copies"), bin_chunk_nbytes=16)
    data = IndexedDataset("s3://bucket/text", object_storage_config=storage)
    assert [data[i].tolist() for i in range(4)] == DOCUMENTS
    # the last sequence, bytes 20 to 33, ends beyond its chunk
    assert s3.requests == ["download", "bytes=0-15", "bytes=16-31", "bytes=16-33"]


def test_the_index_is_copied_once_and_again_when_it_changed(s3: FakeS3, tmp_path: Path) -> None:
    storage = ObjectStorageConfig(str(tmp_path / "copies"))
    for _ in range(2):
        IndexedDataset("s3://bucket/text", object_storage_config=storage)
    assert s3.requests.count("download") == 1
    write(tmp_path / "bucket" / "text", [*DOCUMENTS, [1]])
    assert len(IndexedDataset("s3://bucket/text", object_storage_config=storage)) == 5


def test_a_short_answer_is_an_error(
    s3: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorageConfig(str(tmp_path / "copies"))
    data = IndexedDataset("s3://bucket/text", object_storage_config=storage)
    monkeypatch.setattr(s3, "get_object", lambda **_: {"Body": io.BytesIO(b"")})
    with pytest.raises(DataError, match=r"s3://bucket/text\.bin: asked for 34 bytes at 0, got 0"):
        data[0]


def test_a_directory_for_the_index_is_asked_for() -> None:
    with pytest.raises(DataError, match="--object-storage-cache-path"):
        IndexedDataset("s3://bucket/text")


def test_a_url_without_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="s3://bucket/path/prefix"):
        IndexedDataset("s3://", object_storage_config=ObjectStorageConfig(str(tmp_path)))


def test_a_missing_client_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optional, "why_missing", lambda package: f"{package} is not installed")
    storage = ObjectStorageConfig(str(tmp_path))
    with pytest.raises(MissingDependency, match=r"boto3 is not installed.*megatron-train\[s3\]"):
        IndexedDataset("s3://bucket/text", object_storage_config=storage)


def test_samples_of_a_remote_file_need_a_local_index_cache(s3: FakeS3, tmp_path: Path) -> None:
    prefix = "s3://bucket/text"
    remote = config(object_storage_cache_path=str(tmp_path / "copies"), blend=([prefix], None))
    with pytest.raises(DataError, match="local directory .* --data-cache-path"):
        build(remote)
    cached = replace(remote, path_to_cache=str(tmp_path / "cache"))
    sample = build(cached)[0][0]
    assert (sample["labels"][:-1] == sample["tokens"][1:]).all()


@pytest.mark.parametrize("scheme", ["s3", "msc"])
def test_text_is_tokenized_from_a_copy(s3: FakeS3, scheme: str, tmp_path: Path) -> None:
    lines = [json.dumps({"text": " ".join(map(str, tokens))}) for tokens in DOCUMENTS]
    remote = tmp_path / "bucket" / "text.jsonl"
    remote.write_text("\n".join(lines))
    numbers = TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=100_000)
    tokenizer = create_tokenizer(numbers)
    paths = [f"{scheme}://bucket/text.jsonl"]
    with pytest.raises(DataError, match=r"text\.jsonl lies in object storage: .*--data-cache-path"):
        sources_of(paths, DataConfig(), tokenizer)
    flags = DataConfig(data_cache_path=str(tmp_path / "tokens"))
    (source,) = sources_of(paths, flags, tokenizer)
    os.makedirs(source.directory)
    tokenize([source], tokenizer, 1)
    data = IndexedDataset(shard_prefix(source.directory, 0))
    assert [s.tolist()[:-1] for s in data[:]] == DOCUMENTS
    assert not list(Path(source.directory).glob("*.jsonl"))
    remote.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="has changed since its tokens were cached"):
        sources_of(paths, flags, tokenizer)


def build(remote: GPTDatasetConfig) -> list[Any]:
    return BlendedMegatronDatasetBuilder(GPTDataset, [1, 0, 0], lambda: True, remote).build()
