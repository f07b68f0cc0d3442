"""The manifest of a checkpoint folder, the JSON files beside it, and checksums.  No torch.

A folder is a checkpoint if it has a manifest, and the manifest is written last.  It holds size and
checksum of every other file and a checksum of itself, so whatever was cut or altered is found.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeGuard

from megatron.core import optional
from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.value_types import JsonObject, Layout
from megatron.core.file_names import path_inside

FORMAT = "safetensors_dist"
SAVE = "save"  # in the layout of a part of a local checkpoint: [when, attempt] of its save
VERSION = 1
_BLOCK_BYTES = 4 << 20
MANIFEST = "metadata.json"
MANIFEST_BESIDE = "manifest.json"  # where metadata.json belongs to another program's format
INDEX = "index.json"
COMMON = "common.json"
CONFIG = "config.yaml"
METADATA = ".metadata"  # the index of PyTorch's distributed checkpoints
COMMON_FILE = "common.pt"  # of torch_dist: everything that is no tensor


# The checksum of every block.  The package isal computes zlib's number about ten times as fast;
# without it, saving and loading spend more than half of their processor time on checksums.
if optional.available("isal.isal_zlib"):
    crc32: Callable[..., int] = optional.require("isal.isal_zlib", "checkpoints").crc32
else:
    crc32 = zlib.crc32


# What taking values out of a structure raises that is not as expected; torch's is RuntimeError.
MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError),
    *(TypeError, ValueError),
)


class CheckpointDamaged(CheckpointError):
    """A published checkpoint is not what was written: a file is missing, cut or altered."""


@dataclass(frozen=True)
class FileEntry:
    """A file as the manifest knows it.  ``crc32`` covers its first ``checked_bytes``."""

    num_bytes: int
    checked_bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What makes a folder a checkpoint.

    ``sequence`` counts the publishes in one directory: after somebody went back to an older step,
    the newest checkpoint is the one published last, not the one with the highest iteration.
    ``tracker_before`` is the tracker file as this save found it: [text, modified at ns], or None.
    """

    iteration: int
    sequence: int = 0
    attempt: str = ""  # names the process group that wrote it
    published_at_ns: int = 0
    tracker_before: list[str | int] | None = None
    layout: Layout
    files: Mapping[str, FileEntry]


def rank_state_name(rank: int) -> str:
    """The file of what only ``rank`` knows."""
    return f"__{rank}_state.json"


def write_json(path: Path, value: object) -> FileEntry:
    """Write ``value`` to ``path`` and fsync it.  Raises OSError; TypeError for what is no JSON."""
    return write_text(path, json.dumps(value, separators=(",", ":")))


def write_text(path: Path, text: str) -> FileEntry:
    """Write ``text`` to ``path`` and fsync it.  Raises OSError."""
    data = text.encode()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(data), len(data), crc32(data))


def adopt_file(path: Path) -> FileEntry:
    """Fsync a file that somebody else wrote, and take it into the manifest."""
    size = checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, checksum = size + len(block), crc32(block, checksum)
        os.fsync(file.fileno())
    return FileEntry(size, size, checksum)


def fsync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, manifest: Manifest, name: str = MANIFEST) -> None:
    """Write and fsync the manifest, which makes ``folder`` complete."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    write_text(folder / name, _canonical({**body, "crc32": _checksum(body)}))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of ``folder``; None if there is none.

    Raises CheckpointDamaged if it cannot be read, is cut or altered, CheckpointError if it is of a
    newer version.
    """
    return _read(folder / MANIFEST_BESIDE) or _read(folder / MANIFEST)


def _read(path: Path) -> Manifest | None:
    try:
        body = read_json(path)
    except FileNotFoundError:
        return None
    if not isinstance(body, dict):
        raise CheckpointDamaged(f"{path} is damaged: it is no JSON object")
    if body.get("format") != FORMAT and "sharded_backend" in body:
        return None
    claimed = body.pop("crc32", None)
    try:
        is_intact = claimed == _checksum(body)
    except RecursionError:
        is_intact = False
    if not is_intact:
        raise CheckpointDamaged(f"{path} is damaged: its checksum does not fit its content")
    version = body.get("version")
    if type(version) is not int:
        raise CheckpointDamaged(f"{path} is damaged: its format version is {version!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this program reads up to {VERSION}: "
            "use the program that wrote it"
        )
    try:
        return _manifest_of(body, path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointDamaged(f"{path} is damaged: {error} is not of a manifest") from None


def _manifest_of(body: JsonObject, path: Path) -> Manifest:
    """The manifest in ``body``.  Raises CheckpointDamaged, and what Python raises for others."""
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    for name in files:
        path_inside(path.parent, name, path, below=True, error=CheckpointDamaged)
    known = {f.name for f in fields(Manifest)}
    found = Manifest(**{k: v for k, v in body.items() if k in known} | {"files": files})
    numbers = [found.iteration, found.sequence, found.published_at_ns]
    numbers += [number for entry in files.values() for number in asdict(entry).values()]
    if not all(map(is_count, numbers)):
        raise ValueError("a number below 0 or above 2**63")
    before = found.tracker_before
    knows_tracker = isinstance(before, list) and list(map(type, before)) == [str, int]
    if not isinstance(found.attempt, str) or not (before is None or knows_tracker):
        raise ValueError(f"attempt {found.attempt!r}, tracker {before!r}")
    if any(entry.checked_bytes > entry.num_bytes for entry in files.values()):
        raise ValueError("a checksum of more bytes than a file has")
    _check_layout(found.layout)
    return found


def _check_layout(layout: Layout) -> None:
    """Raise ValueError unless it is empty, or names sizes of the axes of a grid of ranks."""
    if not isinstance(layout, dict) or not is_count(layout.get("world_size", 0)):
        raise ValueError(f"layout {layout!r}")
    for grid in ("dense", "expert"):
        axes = layout.get(grid, [])
        if not isinstance(axes, list) or any(
            not isinstance(axis, list) or list(map(type, axis)) != [str, int] for axis in axes
        ):
            raise ValueError(f"layout {layout!r}")


def is_count(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer from 0 to 2**63 - 1; True and 1.0 are none."""
    return type(value) is int and 0 <= value < 1 << 63


def are_counts(values: object) -> TypeGuard[list[int]]:
    """Whether ``values`` is a list of integers from 0 to 2**63 - 1."""
    return isinstance(values, list) and all(map(is_count, values))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what is wrong with the file itself into CheckpointDamaged with its name.

    A name from a file may hold what no path can, which is a ValueError.
    """
    try:
        yield
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error}") from None


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Turn what Python raises for values of other types than expected into CheckpointDamaged.

    For formats whose values are an arbitrary graph of objects.
    """
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        raise CheckpointDamaged(
            f"{path} is damaged: a value in it does not fit ({type(error).__name__}: {error})"
        ) from None


def read_json(path: Path) -> object:
    """What a JSON file holds.  Raises FileNotFoundError, and CheckpointDamaged for all else."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error.strerror or error}") from None
    return parse_json(data, f"{path} is damaged: it")


def parse_json(data: bytes, what: str) -> object:
    """The JSON value in ``data``, no key of an object twice.

    Raises CheckpointDamaged, whose message begins with ``what``, for anything else.
    """
    try:
        return json.loads(data, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise CheckpointDamaged(f"{what} is nested too deeply") from None
    except ValueError as error:  # also no UTF-8, or an integer of more digits than Python takes
        raise CheckpointDamaged(f"{what} is no JSON: {error}") from None


def json_object(data: bytes, what: str) -> JsonObject:
    """`parse_json` of what must be an object."""
    found = parse_json(data, what)
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{what} is a {type(found).__name__}, not a JSON object")
    return found


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of ``pairs``; ValueError if it has a key twice: readers differ in what counts."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {max(names, key=names.count)} twice")
    return out


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """The checked part of a file: all of a JSON file, the header of a data file.

    Raises CheckpointDamaged if the file is missing, or its size or checksum is another.
    """
    path = folder / name
    entry = manifest.files.get(name)
    if entry is None:
        raise CheckpointDamaged(f"{path} is not in {MANIFEST}")
    check_size(folder, name, entry)
    with reading(path), open(path, "rb") as file:
        data = file.read(entry.checked_bytes)
    if crc32(data) != entry.crc32:
        raise CheckpointDamaged(f"{path} is damaged: its checksum does not fit its content")
    return data


def check_size(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise CheckpointDamaged if the file is missing or has another size."""
    path = folder / name
    with reading(path):
        size = path.stat().st_size
    if size != entry.num_bytes:
        raise CheckpointDamaged(f"{path} has {size} bytes, {entry.num_bytes} were written")


def _checksum(body: JsonObject) -> int:
    return crc32(_canonical(body).encode())


def _canonical(body: JsonObject) -> str:
    return json.dumps(body, sort_keys=True, indent=1)
