"""The manifest of a checkpoint folder, its other JSON files, and checksums.  No torch.

A folder with a manifest is a complete checkpoint, because the manifest is written last.  It has the
size and checksum of every other file and a checksum of itself, so truncated or changed files are
detected.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeGuard

from megatron.core import optional
from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.text_files import path_inside

FORMAT = "safetensors_dist"
SAVE = "save"  # in the layout of one part of a local checkpoint: [time, attempt] of its save
VERSION = 1
_BLOCK_BYTES = 4 << 20
MANIFEST = "metadata.json"
MANIFEST_BESIDE = "manifest.json"  # if the format uses metadata.json itself
INDEX = "index.json"
COMMON = "common.json"
CONFIG = "config.yaml"
# Entries of the state of a rank; the keys of Megatron-LM.
RNG_STATE = "rng_state"
RERUN_STATE = "rerun_state_machine"
# Entry of `Arguments` that Megatron-LM does not have: size of the vocabulary without padding.
TRUE_VOCAB_SIZE = "true_vocab_size"
METADATA = ".metadata"  # the index of PyTorch's distributed checkpoints
COMMON_FILE = "common.pt"  # in torch_dist: all values except tensors


# CRC-32 of every block.  The package isal computes the same value as zlib about ten times as fast;
# without it, checksums take more than half of the CPU time of saving and loading.
if optional.available("isal.isal_zlib"):
    crc32: Callable[..., int] = optional.require("isal.isal_zlib", "checkpoints").crc32
else:
    crc32 = zlib.crc32


# Errors of reading values from a malformed structure; torch raises RuntimeError.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


Common = Mapping[str, Any]  # values equal on all ranks: `Contents.common`
Layout = Mapping[str, Any]  # degrees and rank order of the run that wrote a checkpoint


@dataclass(frozen=True)
class FileEntry:
    """A file in the manifest.  ``crc32`` covers its first ``checked_bytes`` bytes."""

    num_bytes: int
    checked_bytes: int
    crc32: int


FileEntries = dict[str, FileEntry]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a manifest file, whose presence makes a folder a checkpoint.

    ``sequence`` counts the publishes in one directory.  The newest checkpoint has the highest
    sequence, not the highest iteration: a user may have continued from an older iteration.
    ``tracker_before`` is the tracker file that this save found: [text, modified at ns], or None.
    """

    iteration: int
    sequence: int = 0
    attempt: str = ""  # id of the run that wrote it
    published_at_ns: int = 0
    tracker_before: list[str | int] | None = None
    layout: Layout
    files: FileEntries


# An index entry: ``shape``, ``dtype`` (the format's name for it), and ``pieces``, the boxes.  A
# piece has ``file``, ``start`` and ``num_bytes``, its ``offset`` and ``shape``, ``crc32`` of each
# block.  In torch_dist also ``cut`` ([sharded dimension, number of shards] or None) and
# ``num_stacked`` (leading layer and expert dimensions) and ``counts`` (their sizes, if known).
TensorEntry = JsonObject
TensorEntries = dict[str, TensorEntry]


def rank_state_name(rank: int) -> str:
    """Return the name of the file with the state of ``rank``."""
    return f"__{rank}_state.json"


def write_json(path: Path, value: object) -> FileEntry:
    """Write ``value`` to ``path`` and fsync it.  Raises OSError; TypeError if it is not JSON."""
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
    """Fsync a file written by other code, and return its entry for the manifest."""
    size = checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, checksum = size + len(block), crc32(block, checksum)
        os.fsync(file.fileno())
    return FileEntry(size, size, checksum)


def fsync_folder(folder: Path) -> None:
    """Make the file names in ``folder`` durable."""
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
    """Read the manifest of ``folder``; return None if there is none.

    Raises CheckpointDamaged if it cannot be read or was changed, CheckpointError if its version is
    newer than this program.
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
    with parsing(path):
        if claimed != _checksum(body):
            raise CheckpointDamaged(f"{path} is damaged: its checksum does not fit its content")
        version = body.get("version")
        if type(version) is not int:
            raise ValueError(f"format version {version!r}")
        if version > VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, this program reads up to {VERSION}: "
                "use the program that wrote it"
            )
        return _manifest_of(body, path)


def _manifest_of(body: JsonObject, path: Path) -> Manifest:
    """Convert ``body`` to a manifest.

    Raises CheckpointDamaged for a path outside the folder, and Python's errors for wrong types.
    """
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    for name in files:
        path_inside(path.parent, name, path, below=True, error=CheckpointDamaged)
    known = {f.name for f in fields(Manifest)}
    found = Manifest(**{k: v for k, v in body.items() if k in known} | {"files": files})
    numbers = [found.iteration, found.sequence, found.published_at_ns]
    for entry in files.values():
        numbers += [entry.num_bytes, entry.checked_bytes, entry.crc32]
        if entry.checked_bytes > entry.num_bytes:
            raise ValueError("a checksum of more bytes than a file has")
    before = found.tracker_before
    knows_tracker = isinstance(before, list) and list(map(type, before)) == [str, int]
    if not are_counts(numbers):
        raise ValueError("a number below 0 or above 2**63")
    if not isinstance(found.attempt, str) or not (before is None or knows_tracker):
        raise ValueError(f"attempt {found.attempt!r}, tracker {before!r}")
    _check_layout(found.layout)
    return found


def _check_layout(layout: Layout) -> None:
    """Raise ValueError unless the layout is empty or has a size for each axis of a rank grid."""
    grids = [layout.get(grid, []) for grid in ("dense", "expert")]
    axes = [axis for grid in grids for axis in grid]
    if not is_count(layout.get("world_size", 0)) or any(
        not isinstance(axis, list) or list(map(type, axis)) != [str, int] for axis in axes
    ):
        raise ValueError(f"layout {layout!r}")


def is_count(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an int from 0 to 2**63 - 1; bool and float are not."""
    return type(value) is int and 0 <= value < 1 << 63


def are_counts(values: object) -> TypeGuard[list[int]]:
    """Return whether ``values`` is a list of ints from 0 to 2**63 - 1."""
    return isinstance(values, list) and all(map(is_count, values))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of opening or reading ``path`` to CheckpointDamaged.

    A name stored in a file may contain characters that no path can have, a ValueError.
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
    """Convert Python's errors for unexpected types and values to CheckpointDamaged.

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
    """Return the contents of a JSON file.

    Raises FileNotFoundError, and CheckpointDamaged for every other problem.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read: {error.strerror or error}") from None
    return _parse_json(data, f"{path} is damaged: it")


def _parse_json(data: bytes, what: str) -> object:
    """Parse ``data`` as JSON without duplicate keys.

    Raises CheckpointDamaged otherwise, with a message that begins with ``what``.
    """
    try:
        return json.loads(data, object_pairs_hook=_without_repeats)
    # Also invalid UTF-8, an integer with too many digits, or nested too deeply.
    except (RecursionError, ValueError) as error:
        raise CheckpointDamaged(f"{what} is no JSON: {error}") from None


def json_object(data: bytes, what: str) -> JsonObject:
    """Parse a JSON object without duplicate keys; raise CheckpointDamaged for anything else."""
    found = _parse_json(data, what)
    if not isinstance(found, dict):
        raise CheckpointDamaged(f"{what} is a {type(found).__name__}, not a JSON object")
    return found


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the dict of ``pairs``; raise ValueError for a duplicate key.

    JSON readers differ in which of the values they use.
    """
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {max(names, key=names.count)} twice")
    return out


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Return the checked part of a file: a complete JSON file, or the header of a data file.

    Raises CheckpointDamaged if the file is missing, or its size or checksum differs.
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
