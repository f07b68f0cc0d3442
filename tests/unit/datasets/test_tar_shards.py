"""Tar shards: what is one sample, and the index beside the file."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.errors import DataError
from megatron.core.datasets.tar_shards import TarShard, TarShards, shard_paths


def write_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return str(path)


def two_samples(path: Path) -> str:
    return write_tar(
        path, [("a.jpg", b"A"), ("a.json", b"{}"), ("sub/b.png", b"B"), ("sub/b.txt", b"text")]
    )


def test_files_of_one_name_are_a_sample(tmp_path: Path) -> None:
    files = [("x.0.jpg", b"0"), ("x.1.PNG", b"1"), ("x.cls", b"3"), ("x.json", b"{}")]
    files += [("noext", b"-"), (".hidden.jpg", b"-"), ("y.v.2.txt", b"text"), ("d.e/y.txt", b"z")]
    shard = TarShard(write_tar(tmp_path / "s.tar", files))
    assert len(shard) == 3
    first, second, third = (shard.read(i) for i in range(3))
    assert (first.images, first.json, first.text) == ([b"0", b"1"], b"{}", None)
    assert (second.images, second.text, third.text) == ([], b"text", b"z")
    assert first.name == f"{tmp_path}/s.tar, sample x"
    assert third.name.endswith("sample d.e/y")


def test_a_directory_and_a_range_are_one_list(tmp_path: Path) -> None:
    for number in (11, 9, 10):
        write_tar(tmp_path / f"s-{number:03}.tar", [(f"{number}.txt", str(number).encode())])
    for path in (tmp_path, tmp_path / "s-{009..011}.tar"):
        assert [sample.text for sample in TarShards(str(path))] == [b"9", b"10", b"11"]


def test_the_index_is_built_once_and_again_when_the_file_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = two_samples(tmp_path / "s.tar")
    assert len(TarShard(path)) == 2
    assert (tmp_path / "s.tar.index-description.txt").exists()
    builds: list[str] = []
    build = TarShard._build

    def counted(shard: TarShard) -> object:
        builds.append(shard.path)
        return build(shard)

    monkeypatch.setattr(TarShard, "_build", counted)
    assert len(TarShard(path)) == 2
    assert builds == []
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert len(TarShard(path)) == 2
    assert builds == [path]
    write_tar(tmp_path / "s.tar", [("c.txt", b"c" * 4096)])
    assert TarShard(path).read(0).text == b"c" * 4096
    assert builds == [path, path]
    (tmp_path / "s.tar.index-members.npy").write_bytes(b"damaged")
    assert len(TarShard(path)) == 1
    assert len(builds) == 3


def test_the_index_may_be_in_another_directory(tmp_path: Path) -> None:
    path = two_samples(tmp_path / "s.tar")
    assert len(TarShard(path, str(tmp_path / "cache"))) == 2
    assert not list(tmp_path.glob("s.tar.index*"))
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize("member", [(1 << 40, 5), (1 << 62, 1 << 62), (512, 2**63 - 1), (-512, 5)])
def test_an_index_of_places_outside_of_the_shard_is_built_again(
    member: tuple[int, int], tmp_path: Path
) -> None:
    path = two_samples(tmp_path / "s.tar")
    TarShard(path)
    rows = np.array([[0, 1, *member], [1, 1, 512, 1]], np.int64)
    np.save(tmp_path / "s.tar.index-members.npy", rows)
    (tmp_path / "s.tar.index-crc.json").unlink()
    assert TarShard(path).read(0).images == [b"A"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="null byte; a shard of samples is missing"):
        TarShard("a\0b.tar")
    two_samples(tmp_path / "s-0.tar")
    with pytest.raises(DataError, match=r"s-1\.tar: .*missing"):
        TarShards(str(tmp_path / "s-{0..1}.tar"))
    with pytest.raises(DataError, match="the smaller number first"):
        shard_paths("s-{3..1}.tar")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"no file .* ends in \.tar"):
        shard_paths(str(tmp_path / "none"))


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    path = two_samples(tmp_path / "s.tar")
    whole = Path(path).read_bytes()
    for length in (0, 100, 700, 1024 + 300, 1024 + 600):
        Path(path).write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"s\.tar"):
            TarShard(path)
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(DataError, match="no complete tar file"):
        TarShard(path)
    write_tar(tmp_path / "s.tar", [("README", b"")])
    with pytest.raises(DataError, match="has no samples"):
        TarShard(path)


def test_a_shard_that_is_cut_or_removed_during_the_run_is_named(tmp_path: Path) -> None:
    path = two_samples(tmp_path / "s.tar")
    shard = TarShard(path)
    with open(path, "r+b") as file:
        file.truncate(600)
    with pytest.raises(DataError, match=r"s\.tar had .* cut short"):
        shard.read(1)
    os.remove(path)
    with pytest.raises(DataError, match=r"s\.tar: .*gone"):
        shard.read(0)


def header(
    name: str, size: bytes, kind: bytes = tarfile.REGTYPE, *, is_extended: bool = False
) -> bytes:
    """Return a tar header whose size is the 12 bytes ``size``."""
    data = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    data[124:136] = size.ljust(12, b"\0")
    data[156:157] = kind
    data[482] |= is_extended  # a map of a sparse file goes on behind this header
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:]) + 8 * 32)
    return bytes(data)


def binary(number: int) -> bytes:
    """Return a size in the base 256 of GNU tar."""
    return number.to_bytes(12, "big", signed=True) if number < 0 else _large(number)


def _large(number: int) -> bytes:
    return b"\x80" + number.to_bytes(11, "big")


PAX = b"23 size=-1000000000000\n"
DAMAGED = {
    "a negative size": header("a.jpg", binary(-1024)) + header("b.jpg", b"0") * 4,
    "a size of minus one block": header("a.jpg", b"0") + header("b.jpg", binary(-512)),
    "a size of minus nothing": header("a.jpg", b"0") + header("b.jpg", binary(-1)),
    "a large size": header("a.jpg", binary(1 << 80)),
    "a size of 9 exabytes": header("a.jpg", binary(1 << 63)),
    "a negative size of extended headers": header("a", binary(-512), tarfile.XHDTYPE) * 3,
    "a negative size in an extended header": (
        header("a", b"%o" % len(PAX), tarfile.XHDTYPE)
        + PAX.ljust(512, b"\0")
        + header("a.jpg", b"0")
    ),
    "long names in sequence": (header("a", b"1", tarfile.GNUTYPE_LONGNAME) + bytes(512)) * 2000,
    "a directory of negative size": header("a", binary(-512), tarfile.DIRTYPE) * 3,
    "extended headers of a terabyte": header("a", binary(1 << 62), tarfile.XHDTYPE) + bytes(1024),
    "a map of a sparse file without an end": (
        header("a.jpg", b"0", tarfile.GNUTYPE_SPARSE, is_extended=True) + b"\xff" * 9728
    ),
    "no header after a file": header("a.jpg", b"0") + b"no header",
    "sparse files of large sizes": header("a.jpg", binary(1 << 70), tarfile.GNUTYPE_SPARSE) * 3,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "s.tar").write_bytes(DAMAGED[name].ljust(10240, b"\0"))
    with pytest.raises(DataError, match=r"s\.tar"):
        TarShard(str(tmp_path / "s.tar"))


@pytest.mark.parametrize("numbers", ["0..999999999", "0..1000000", "0..999999999999999999"])
def test_a_range_of_too_many_shards_is_refused(numbers: str) -> None:
    with pytest.raises(DataError, match="the range .* must have 1 to 1000000 shards"):
        shard_paths(f"x-{{{numbers}}}.tar")


def test_a_range_of_long_numbers_is_a_path_that_does_not_exist() -> None:
    with pytest.raises(DataError, match="a shard of samples is missing"):
        TarShards("x-{0.." + "9" * 50 + "}.tar")
