"""One process builds, the others wait; nothing half written is ever read."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets import index_cache
from megatron.core.datasets.index_cache import build_once, load_array, save_array, write_atomically


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "cache" / "index")


def reader(path: str) -> Callable[[], str | None]:
    return lambda: Path(path).read_text() if Path(path).exists() else None


def writer(path: str, text: str = "built") -> Callable[[], str]:
    def write() -> str:
        write_atomically(path, lambda file: file.write(text.encode()))
        return text

    return write


def test_what_is_there_is_not_built(path: str) -> None:
    os.makedirs(os.path.dirname(path))
    Path(path).write_text("old")
    assert build_once(path, reader(path), writer(path)) == "old"


def test_only_the_result_stays_behind(path: str) -> None:
    assert build_once(path, reader(path), writer(path)) == "built"
    assert os.listdir(os.path.dirname(path)) == ["index"]


def test_one_of_many_builds_and_all_get_its_result(path: str) -> None:
    together = threading.Barrier(8)
    builders = []

    def build() -> str:
        builders.append(threading.get_ident())
        return writer(path)()

    def ask(_: int) -> str:
        together.wait()
        return build_once(path, reader(path), build)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == ["built"] * 8
    assert len(builders) == 1


def test_who_waits_for_a_failed_build_builds_itself(path: str) -> None:
    starts = threading.Event()

    def fail() -> str:
        starts.set()
        raise MemoryError("no room")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(build_once, path, reader(path), fail)
        assert starts.wait(timeout=10)
        assert build_once(path, reader(path), writer(path)) == "built"
        with pytest.raises(MemoryError, match="no room"):
            first.result(timeout=20)
    assert os.listdir(os.path.dirname(path)) == ["index"]


def _die_while_building(path: str) -> None:
    build_once(path, lambda: None, lambda: os._exit(9))


def test_a_builder_that_is_killed_makes_room_for_the_next(path: str) -> None:
    child = multiprocessing.get_context("fork").Process(target=_die_while_building, args=(path,))
    child.start()
    child.join(timeout=20)
    assert child.exitcode == 9
    assert os.path.exists(f"{path}.lock")  # its file stays, the lock is gone with the process
    assert build_once(path, reader(path), writer(path)) == "built"


def test_a_file_system_without_locks_lets_everyone_build(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with caplog.at_level(logging.WARNING):
        assert build_once(path, reader(path), writer(path)) == "built"
    assert "this file system has no file locks" in caplog.text


def test_an_unwritable_directory_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "cache" / "index")
    with pytest.raises(DataError, match="cannot write the index cache .* --data-cache-path"):
        build_once(inside, lambda: None, lambda: "")


def test_a_directory_without_write_permission_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:  # root may write everywhere
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(index_cache, "open", denied, raising=False)
    with pytest.raises(DataError, match="Permission denied"):
        build_once(path, lambda: None, lambda: "")


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")

    def interrupted(file: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(str(target), interrupted)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("num_bytes", [0, 10, 130])
def test_a_damaged_array_is_told_and_treated_as_missing(
    tmp_path: Path, num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"{num_bytes}.npy"
    save_array(str(path), np.arange(5))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with caplog.at_level(logging.WARNING):
        assert load_array(str(path)) is None
        assert load_array(str(path)) is None
    assert caplog.text.count("is damaged and is built again") == 1
