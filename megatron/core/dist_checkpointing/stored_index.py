"""Parse the index of a checkpoint in this project's format: file and position of every tensor box.

A correct checksum does not make a file trustworthy: whoever writes it can compute the checksum.
Every value is therefore checked before memory of that shape is allocated or that position is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from megatron.core.config.errors import CheckpointDamaged
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.manifest import FileEntry, are_counts, is_count, json_object
from megatron.core.dist_checkpointing.safetensors_file import DTYPES

_MAX_ELEMENTS = 1 << 58  # limit for a shape (zeros count as 1): torch multiplies in 64 bits
_SHOWN = 80  # characters of a value in a message
_PAIRS = 1 << 22  # pairs of boxes compared at a time


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor; subclasses add where its values are stored."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredPiece(StoredBox):
    """A box with its position in a file."""

    file: str
    start: int  # bytes
    num_bytes: int
    crc32: tuple[int, ...]  # one per block


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, composed of its pieces.

    Up to ``max_padding`` of its last rows may be vocabulary padding.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredBox, ...]
    max_padding: int = 0


def parse_index(
    data: bytes, path: Path, files: Mapping[str, FileEntry], *, is_whole: bool
) -> tuple[dict[str, StoredTensor], int]:
    """Return all tensors by key, and the block size of the checksums.

    ``data`` was read from ``path``; ``files`` are the manifest's entries.

    Raises CheckpointDamaged unless every piece is within its tensor and its file, no bytes are
    used twice, and, with ``is_whole``, the pieces have as many elements as their tensor.  Overlaps
    of pieces are found by `check_pieces`.
    """
    index = json_object(data, f"{path} is damaged: it")
    block_bytes, entries = index.get("block_bytes"), index.get("tensors")
    if not isinstance(entries, dict) or not is_count(block_bytes) or block_bytes == 0:
        raise CheckpointDamaged(f"{path} is damaged: it is no index of tensors")
    tensors: dict[str, StoredTensor] = {}
    places: set[tuple[str, int]] = set()
    for key, entry in entries.items():
        try:
            shape, dtype, pieces = _tensor(entry, files, block_bytes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{path} is damaged: {key}: {_reason(error)}") from None
        tensors[key] = StoredTensor(shape, dtype, pieces)
        taken = [(piece.file, piece.start) for piece in pieces if piece.num_bytes]
        if len(set(taken)) < len(taken) or places.intersection(taken):
            raise CheckpointDamaged(f"{path} is damaged: bytes of {key} are used twice")
        places.update(taken)
        missing = prod(shape) - sum(prod(piece.shape) for piece in pieces)
        if is_whole and missing:
            raise CheckpointDamaged(f"{path} is damaged: {missing} elements of {key} are missing")
    return tensors, block_bytes


def check_pieces(key: str, pieces: Sequence[StoredBox], where: object) -> None:
    """Raise CheckpointDamaged if two pieces of ``key`` overlap: their values could differ."""
    boxes = [(p.offset, p.shape) for p in pieces if prod(p.shape)]
    if len(boxes) < 2:
        return
    begins = np.array([offset for offset, _ in boxes], np.int64).reshape(len(boxes), -1)
    ends = begins + np.array([shape for _, shape in boxes], np.int64).reshape(len(boxes), -1)
    step = max(1, _PAIRS // len(boxes))
    for low in range(0, len(boxes), step):
        mine = slice(low, low + step)
        shared = np.minimum(ends[mine, None], ends) > np.maximum(begins[mine, None], begins)
        if shared.all(axis=2).sum() > len(ends[mine]):  # each box overlaps with itself
            raise CheckpointDamaged(f"{where} is damaged: two parts of {key} overlap")


def _tensor(
    entry: JsonObject, files: Mapping[str, FileEntry], block_bytes: int
) -> tuple[tuple[int, ...], torch.dtype, tuple[StoredPiece, ...]]:
    """Check and convert an index entry.  Raises ValueError, and Python's errors for wrong types."""
    shape = entry["shape"]
    if not are_counts(shape) or prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise ValueError(f"its shape is {_shown(shape)}")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"its dtype is {_shown(entry['dtype'])}")
    if not isinstance(entry["pieces"], list):
        raise ValueError("it has no list of pieces")
    pieces = tuple(_piece(piece, shape, dtype, block_bytes) for piece in entry["pieces"])
    for piece in pieces:
        if piece.file not in files:
            raise ValueError(f"{piece.file} is not in the manifest")
        if piece.start + piece.num_bytes > files[piece.file].num_bytes:
            raise ValueError(f"{piece.file} ends before byte {piece.start + piece.num_bytes}")
    return tuple(shape), dtype, pieces


def _piece(
    piece: JsonObject, whole: Sequence[int], dtype: torch.dtype, block_bytes: int
) -> StoredPiece:
    file, offset, shape = piece["file"], piece["offset"], piece["shape"]
    numbers, checksums = [piece["start"], piece["num_bytes"]], piece["crc32"]
    if not isinstance(file, str) or not all(map(are_counts, (offset, shape, numbers, checksums))):
        raise ValueError("a piece is not described by counts")
    start, num_bytes = numbers
    is_inside = len(offset) == len(shape) == len(whole) and all(
        o + n <= size for o, n, size in zip(offset, shape, whole, strict=True)
    )
    if not is_inside:
        raise ValueError(f"a piece {_shown(shape)} at {_shown(offset)} is not inside {whole}")
    if num_bytes != prod(shape) * dtype.itemsize or len(checksums) != -(-num_bytes // block_bytes):
        raise ValueError(
            f"a piece {_shown(shape)} has {num_bytes} bytes and {len(checksums)} checksums"
        )
    return StoredPiece(tuple(offset), tuple(shape), file, start, num_bytes, tuple(checksums))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
