"""The manifest of a checkpoint folder, the JSON files beside it, and checksums.  No torch.

A folder is a checkpoint if it has a manifest, and the manifest is written last.  It holds size and
checksum of every other file and a checksum of itself, so whatever was cut or altered is found.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron.core import optional
from megatron.core.config.errors import CheckpointError
from megatron.core.file_names import path_inside

FORMAT = "safetensors_dist"
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
    tracker_before: list[Any] | None = None
    layout: Mapping[str, Any]  # degrees and rank order of the run that wrote it
    files: Mapping[str, FileEntry]


def rank_state_name(rank: int) -> str:
    """The file of what only ``rank`` knows."""
    return f"__{rank}_state.json"


def write_json(path: Path, value: Any) -> FileEntry:
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


def write_manifest(folder: Path, manifest: Manifest, name: str = MANIFEST) -> None:
    """Write and fsync the manifest, which makes ``folder`` complete."""
    body = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    write_text(folder / name, _canonical({**body, "crc32": _checksum(body)}))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of ``folder``; None if there is none.

    Raises CheckpointDamaged if it is cut or altered, CheckpointError if it is of a newer version.
    """
    beside = folder / MANIFEST_BESIDE
    return _read(beside) if beside.exists() else _read(folder / MANIFEST)


def _read(path: Path) -> Manifest | None:
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:  # no JSON, or no UTF-8
        raise CheckpointDamaged(f"{path} is damaged: it is no JSON") from None
    if not isinstance(body, dict):
        raise CheckpointDamaged(f"{path} is damaged: it is no JSON object")
    if body.get("format") != FORMAT and "sharded_backend" in body:
        return None
    claimed = body.pop("crc32", None)
    if claimed != _checksum(body):
        raise CheckpointDamaged(f"{path} is damaged: its checksum does not fit its content")
    if body["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {body['version']}, this program reads up to {VERSION}: "
            "use the program that wrote it"
        )
    files = {name: FileEntry(**entry) for name, entry in body["files"].items()}
    for name in files:
        path_inside(path.parent, name, path, below=True, error=CheckpointDamaged)
    known = {f.name for f in fields(Manifest)}
    return Manifest(**{k: v for k, v in body.items() if k in known} | {"files": files})


def read_checked(folder: Path, name: str, manifest: Manifest) -> bytes:
    """The checked part of a file: all of a JSON file, the header of a data file.

    Raises CheckpointDamaged if the file is missing, or its size or checksum is another.
    """
    path = folder / name
    entry = manifest.files.get(name)
    if entry is None:
        raise CheckpointDamaged(f"{path} is not in {MANIFEST}")
    check_size(folder, name, entry)
    with open(path, "rb") as file:
        data = file.read(entry.checked_bytes)
    if crc32(data) != entry.crc32:
        raise CheckpointDamaged(f"{path} is damaged: its checksum does not fit its content")
    return data


def check_size(folder: Path, name: str, entry: FileEntry) -> None:
    """Raise CheckpointDamaged if the file is missing or has another size."""
    path = folder / name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path} is missing") from None
    if size != entry.num_bytes:
        raise CheckpointDamaged(f"{path} has {size} bytes, {entry.num_bytes} were written")


def _checksum(body: Mapping[str, Any]) -> int:
    return crc32(_canonical(body).encode())


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, indent=1)
