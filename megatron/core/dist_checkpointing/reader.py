"""Read a checkpoint folder: any box of any tensor, reading only the bytes that contain it.

Needs only the folder: no process group, no model.  Every block is compared with its checksum before
its values are used.

A correct checksum does not make a file trustworthy: whoever writes it can compute the checksum.
Every value of the index is therefore checked before memory of that shape is allocated or that
position is read.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import JsonObject, Shape
from megatron.core.dist_checkpointing.manifest import (
    COMMON,
    INDEX,
    MANIFEST,
    SAVE,
    FileEntries,
    are_counts,
    check_size,
    crc32,
    is_count,
    json_object,
    rank_state_name,
    read_checked,
    read_manifest,
    reading,
)
from megatron.core.dist_checkpointing.records import TensorRecord
from megatron.core.dist_checkpointing.safetensors_file import (
    DTYPES,
    LENGTH_BYTES,
    bytes_of,
    dtype_name,
    parse_header,
    piece_name,
)

Box = tuple[slice, ...]


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """One published checkpoint folder.  A context manager; ``close`` closes its files.

    Several threads may read at once: reads and checksums release the GIL.  Raises
    CheckpointDamaged if a file differs from what was written.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise CheckpointDamaged(f"{self.folder / MANIFEST} is missing")
        self.manifest = manifest
        self.tensors, self._block_bytes = parse_index(
            read_checked(self.folder, INDEX, manifest),
            self.folder / INDEX,
            manifest.files,
            is_whole=SAVE not in manifest.layout,
        )
        self._whole: set[str] = set()
        self._files: dict[str, int] = {}
        self._entries: dict[tuple[str, str], tuple[torch.dtype, Shape, int]] = {}
        self._opening = threading.Lock()

    @property
    def keys(self) -> Set[str]:
        """Keys of what the checkpoint holds, besides values that all ranks share."""
        return self.tensors.keys()

    def common(self) -> JsonObject:
        """Return the state other than tensors that all ranks share."""
        return self._json(COMMON)

    def rank_state(self, rank: int) -> JsonObject | None:
        """Return the state of ``rank`` of the writing run; None if it was not saved."""
        name = rank_state_name(rank)
        if name not in self.manifest.files:
            return None
        return self._json(name)

    def _json(self, name: str) -> JsonObject:
        return json_object(
            read_checked(self.folder, name, self.manifest), f"{self.folder / name} is damaged: it"
        )

    def check_files(self) -> None:
        """Compare every file with the manifest: sizes, all of JSON files, headers of data files."""
        for name in self.manifest.files:
            read_checked(self.folder, name, self.manifest)

    def check_all(self) -> None:
        """`check_files`, and every block of every tensor against its checksum."""
        self.check_files()
        for key, stored in self.tensors.items():
            for piece in stored.pieces:
                self.read_box(key, piece.offset, torch.empty(piece.shape, dtype=stored.dtype))

    def check_sizes(self) -> None:
        """Compare the size of every file with the manifest."""
        for name, entry in self.manifest.files.items():
            check_size(self.folder, name, entry)

    def read(self, key: str) -> Tensor:
        """Return a complete tensor in host memory, in the dtype of the file."""
        stored = self._stored(key)
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_box(key, (0,) * len(stored.shape), out)
        return out

    def load(self, wanted: TensorRecord, *, cast: bool = False) -> None:
        """Fill the views of ``wanted`` in place.

        Raises CheckpointError if the tensor is missing, its shape differs, or its dtype differs and
        ``cast`` is False.
        """
        if problem := mismatch(wanted, self._stored(wanted.key), cast=cast):
            raise CheckpointError(f"{self.folder}: {problem}")
        for piece in wanted.pieces:
            if not wanted.may_differ:
                piece.fill(partial(self.read_box, wanted.key, piece.offset))
                continue
            piece.data.zero_()
            pairs = zip(piece.offset, self._stored(wanted.key).shape, strict=True)
            view = piece.data[tuple(slice(max(0, size - at)) for at, size in pairs)]
            if view.numel():
                self.read_box(wanted.key, piece.offset, view)

    @torch.no_grad()
    def read_box(self, key: str, offset: Shape, out: Tensor) -> None:
        """Fill ``out`` with the box of its shape at ``offset``, converting to its dtype."""
        stored = self._stored(key)
        if key not in self._whole:
            check_pieces(key, stored.pieces, self.folder)
            self._whole.add(key)
        filled = 0
        for piece in stored.pieces:
            common = _overlap(piece, offset, tuple(out.shape))
            if common is not None:
                in_piece, in_out = common
                target = out[in_out] if in_out else out
                self._read_piece(key, piece, in_piece, target)
                filled += target.numel()
        if filled != out.numel():
            raise CheckpointError(
                f"{self.folder}: {out.numel() - filled} elements of {key} are in none of its files"
            )

    def close(self) -> None:
        """Close the open files; the reader can still be used."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stored(self, key: str) -> StoredTensor:
        stored = self.tensors.get(key)
        if stored is None:
            raise CheckpointError(f"{self.folder} holds no tensor {key}")
        return stored

    def _read_piece(self, key: str, piece: StoredBox, box: Box, target: Tensor) -> None:
        """Read ``box`` of ``piece`` into ``target``, without a copy if its layout permits."""
        assert isinstance(piece, StoredPiece)
        stored = self.tensors[key]
        dtype = stored.dtype
        self._open(piece.file)
        name = piece_name(key, stored.shape, piece.offset, piece.shape)
        if self._entries.get((piece.file, name)) != (dtype, piece.shape, piece.start):
            raise CheckpointDamaged(
                f"{self.folder / INDEX} is damaged: {dtype_name(dtype)} {name} is not what "
                f"{piece.file} holds at byte {piece.start}"
            )
        strides = [prod(piece.shape[d + 1 :]) for d in range(len(piece.shape))]
        first = sum(s.start * stride for s, stride in zip(box, strides, strict=True))
        last = sum((s.stop - 1) * stride for s, stride in zip(box, strides, strict=True))
        count = last + 1 - first
        is_dense = count == target.numel() and target.is_contiguous()
        direct = is_dense and target.dtype == dtype and not device.is_cuda(target.device)
        buffer = target if direct else torch.empty(count, dtype=dtype)
        self._read_bytes(piece, first * dtype.itemsize, bytes_of(buffer))
        if not direct:
            target.copy_(buffer.as_strided(target.shape, strides))

    def _read_bytes(self, piece: StoredPiece, begin: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``begin`` of ``piece``, verifying each block that is touched."""
        path = self.folder / piece.file
        end = begin + len(out)
        size = self._block_bytes
        for i in range(begin // size, -(-end // size)):
            block_begin, block_end = i * size, min((i + 1) * size, piece.num_bytes)
            is_inside = begin <= block_begin and block_end <= end
            if is_inside:
                block = out[block_begin - begin : block_end - begin]
            else:
                block = memoryview(bytearray(block_end - block_begin))
            done = 0
            while done < len(block):
                with reading(path):
                    at = piece.start + block_begin + done
                    count = os.preadv(self._open(piece.file), [block[done:]], at)
                if count == 0:
                    raise CheckpointDamaged(f"{path} ends too early")
                done += count
            if crc32(block) != piece.crc32[i]:
                raise CheckpointDamaged(
                    f"{path} is damaged: block {i} of the tensor at byte {piece.start} does not "
                    "fit its checksum"
                )
            if not is_inside:
                low, high = max(begin, block_begin), min(end, block_end)
                out[low - begin : high - begin] = block[low - block_begin : high - block_begin]

    def _open(self, name: str) -> int:
        """Return the descriptor of a data file; check its size and header the first time."""
        with self._opening:
            if name not in self._files:
                data = read_checked(self.folder, name, self.manifest)
                length = int.from_bytes(data[:LENGTH_BYTES], "little")
                if length != len(data) - LENGTH_BYTES:
                    raise CheckpointDamaged(
                        f"{self.folder / name} is damaged: its header has {len(data)} B, it says "
                        f"{length}"
                    )
                rest = self.manifest.files[name].num_bytes - len(data)
                entries = parse_header(self.folder / name, data[LENGTH_BYTES:], rest)
                for tensor, found in entries.items():
                    self._entries[name, tensor] = found.dtype, found.shape, found.start
                with reading(self.folder / name):
                    self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            return self._files[name]


def mismatch(wanted: TensorRecord, stored: StoredTensor, *, cast: bool) -> str | None:
    """Return an error message if ``stored`` cannot fill ``wanted`` (shape or dtype), else None.

    ``stored`` may have vocabulary padding at its end.  Padding that is as large as this run's own
    is accepted even beyond ``max_padding``, which is an estimate for checkpoints that do not store
    the size of the vocabulary.
    """
    shape, have = wanted.global_shape, stored.shape
    may_pad = bool(stored.max_padding) and have[1:] == shape[1:]
    extra = have[0] - shape[0] if may_pad else 0
    is_padded = 0 < extra <= stored.max_padding or (may_pad and have[0] == wanted.padded_rows)
    may_differ = wanted.may_differ and len(shape) == len(have)
    if shape != have and not is_padded and not may_differ:
        hint = ""
        if extra > 0:
            hint = f" (with --padded-vocab-size {have[0]} if the last {extra} rows are padding)"
        return (
            f"{wanted.key} has shape {list(have)} in the checkpoint "
            f"and {list(shape)} in this run{hint}"
        )
    if wanted.dtype != stored.dtype and not cast:
        return (
            f"{wanted.key} has dtype {dtype_name(stored.dtype)} in the checkpoint "
            f"and {dtype_name(wanted.dtype)} in this run"
        )
    return None


def _overlap(piece: StoredBox, offset: Shape, shape: Shape) -> tuple[Box, Box] | None:
    """Return the slices of the piece and of the wanted box that cover their overlap, or None."""
    in_piece, in_out = [], []
    for have, extent, want, length in zip(piece.offset, piece.shape, offset, shape, strict=True):
        low, high = max(have, want), min(have + extent, want + length)
        if low >= high:
            return None
        in_piece.append(slice(low - have, high - have))
        in_out.append(slice(low - want, high - want))
    return tuple(in_piece), tuple(in_out)


_MAX_ELEMENTS = 1 << 58  # limit for a shape (zeros count as 1): torch multiplies in 64 bits
_SHOWN = 80  # characters of a value in a message
_PAIRS = 1 << 22  # pairs of boxes compared at a time


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor; subclasses add where its values are stored."""

    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class StoredPiece(StoredBox):
    """A box with its position in a file."""

    file: str
    start: int  # bytes
    num_bytes: int
    crc32: Shape  # one per block


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, composed of its pieces.

    Up to ``max_padding`` of its last rows may be vocabulary padding.
    """

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[StoredBox, ...]
    max_padding: int = 0


def parse_index(
    data: bytes, path: Path, files: FileEntries, *, is_whole: bool
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
    tensors = {}
    places: set[tuple[str, int]] = set()
    for key, entry in entries.items():
        try:
            shape, dtype, pieces = _tensor(entry, files, block_bytes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointDamaged(f"{path} is damaged: {key}: {error!r}") from None
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
    entry: JsonObject, files: FileEntries, block_bytes: int
) -> tuple[Shape, torch.dtype, tuple[StoredPiece, ...]]:
    """Check and convert an index entry.  Raises ValueError, and Python's errors for wrong types."""
    shape = entry["shape"]
    if not are_counts(shape) or prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise ValueError(f"its shape is {_shown(shape)}")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None or not isinstance(entry["pieces"], list):
        raise ValueError(f"its dtype is {_shown(entry['dtype'])}, or it has no list of pieces")
    pieces = tuple(_piece(piece, shape, dtype, block_bytes) for piece in entry["pieces"])
    for piece in pieces:
        end = piece.start + piece.num_bytes
        if piece.file not in files or end > files[piece.file].num_bytes:
            raise ValueError(f"{piece.file} is not in the manifest, or ends before byte {end}")
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
