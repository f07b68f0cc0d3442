"""Flipped bits in index caches are found by checksums, or by a second build without them."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets import index_cache
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split
from tests.support.dataset_files import config, dataset, numbered, write
from tests.support.masked_samples import bert_dataset, corpus

FLIPS = 15  # in each file


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def gpt(directory: Path) -> Callable[[], object]:
    lengths = np.random.RandomState(0).randint(1, 60, 200).tolist()
    prefix = write(directory / "data", numbered(lengths))
    return lambda: dataset(prefix, 900, path_to_cache=str(directory / "cache"))


def gpt_that_keeps_the_last_sample(directory: Path) -> Callable[[], object]:
    prefix = write(directory / "data", numbered([7, 1, 30, 1, 9, 12] * 20))
    more = {
        "path_to_cache": str(directory / "cache"),
        "drop_last_partial_validation_sequence": False,
        "add_extra_token_to_sequence": False,
    }
    return lambda: dataset(prefix, None, Split.valid, **more)


def blend(directory: Path) -> Callable[[], object]:
    prefixes = [write(directory / name, numbered([50] * 30)) for name in "abc"]
    parts = [dataset(prefix, 200) for prefix in prefixes]
    cached = config(path_to_cache=str(directory / "cache"))
    return lambda: BlendedDataset(parts, [2, 1, 1], 300, cached)


def masked(directory: Path) -> Callable[[], object]:
    prefix = corpus(directory / "data")
    return lambda: bert_dataset(prefix, path_to_cache=str(directory / "cache"))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


KINDS = [gpt, gpt_that_keeps_the_last_sample, blend, masked]


def flip_each(directory: Path, pattern: str = "*") -> list[tuple[Path, bytes]]:
    """For some bits of each file in turn: the file and its content with the bit flipped."""
    chosen = random.Random(3)
    flipped = []
    for path in sorted(directory.glob(pattern)):
        whole = path.read_bytes()
        for bit in chosen.sample(range(8 * len(whole)), FLIPS):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            flipped.append((path, bytes(data)))
    return flipped


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_of_a_cache_is_found_and_mended(
    tmp_path: Path, kind: Callable[..., Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    build = kind(tmp_path)
    build()
    cache = tmp_path / "cache"
    whole = contents(cache)
    assert len([name for name in whole if name.endswith("-crc.json")]) == 1
    for path, data in flip_each(cache):
        path.write_bytes(data)
        index_cache.warn_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            build()
        assert len(caplog.records) == 1
        assert "built again" in caplog.text
        assert contents(cache) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_without_checksums_every_flipped_bit_is_found_by_building_again(
    tmp_path: Path, kind: Callable[..., Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = kind(tmp_path)
    build()
    cache = tmp_path / "cache"
    (crc,) = cache.glob("*-crc.json")
    written = crc.read_text()
    for path, data in flip_each(cache, "*.npy"):
        crc.unlink()
        whole, array = path.read_bytes(), np.load(path)
        path.write_bytes(data)
        loaded = index_cache.load_array(str(path))
        is_same = loaded is not None and loaded.dtype == array.dtype
        if is_same and np.array_equal(loaded, array):
            path.write_bytes(whole)  # the flip is in the spaces that fill the header up
        build()
        assert path.read_bytes() == whole
        assert crc.read_text() == written


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_without_checksums_is_accepted_and_gets_them(
    tmp_path: Path, kind: Callable[..., Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    build = kind(tmp_path)
    build()
    (crc,) = (tmp_path / "cache").glob("*-crc.json")
    written = crc.read_text()
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("*.npy")}
    crc.unlink()
    caplog.clear()  # of the first build
    with caplog.at_level(logging.WARNING):
        build()
    assert caplog.text == ""
    assert crc.read_text() == written
    assert times == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("*.npy")}


def test_checksums_of_an_earlier_release_are_compared_once_and_completed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build = gpt(tmp_path)
    build()
    (crc,) = (tmp_path / "cache").glob("*-crc.json")
    written = crc.read_text()
    crcs = json.loads(written)
    del crcs["source"]
    crc.write_text(json.dumps(crcs))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        build()
    assert caplog.text == ""
    assert crc.read_text() == written


def test_a_read_only_cache_without_checksums_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = gpt(tmp_path)
    first = build()
    (crc,) = (tmp_path / "cache").glob("*-crc.json")
    crc.unlink()

    def read_only(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index_cache, "write_atomically", read_only)
    again = build()
    assert isinstance(first, GPTDataset)
    assert isinstance(again, GPTDataset)
    assert np.array_equal(first.sample_index, again.sample_index)


@pytest.mark.parametrize("kind", [gpt, masked])
def test_forged_arrays_of_a_read_only_cache_give_a_message(
    tmp_path: Path, kind: Callable[..., Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = kind(tmp_path)
    build()
    (crc,) = (tmp_path / "cache").glob("*-crc.json")
    crc.unlink()
    (path,) = (tmp_path / "cache").glob("*-sample_index.npy")
    np.save(path, np.load(path) + 1_000_000)
    monkeypatch.setattr(os, "access", lambda *_: False)
    forged: Any = build()
    with pytest.raises(DataError, match=r"-\*.npy do not belong to .*data .*: remove them"):
        forged[0]


def test_a_cache_of_an_earlier_release_without_source_is_not_built_again(tmp_path: Path) -> None:
    lengths = np.arange(12).reshape(6, 2)
    prefix = str(tmp_path / "packing")
    shapes = {"lengths": (2,)}
    index_cache.cached_arrays(prefix, "images", shapes, lambda: [lengths])
    index_cache.save_array(f"{prefix}-lengths.npy", np.pad(lengths, ((0, 0), (0, 1))))
    crc = index_cache._crcs_of([f"{prefix}-lengths.npy"])
    (tmp_path / "packing-crc.json").write_text(json.dumps(crc))

    def build() -> list[np.ndarray]:
        raise AssertionError("the cache is built again")

    (found,) = index_cache.cached_arrays(prefix, "images", shapes, build)
    assert np.array_equal(found, lengths)
