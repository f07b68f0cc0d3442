"""Reading a checkpoint folder: any box of any tensor, and only the bytes that hold it.

Needs nothing but the folder: no process group, no model.  Every block that is read is compared
with its checksum before a value of it is used.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import (
    COMMON,
    INDEX,
    MANIFEST,
    CheckpointDamaged,
    check_size,
    crc32,
    rank_state_name,
    read_checked,
    read_manifest,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.safetensors_file import (
    DTYPES,
    LENGTH_BYTES,
    bytes_of,
    parse_header,
)

Box = tuple[slice, ...]


@dataclass(frozen=True)
class StoredPiece:
    """A box as it lies in a file."""

    file: str
    start: int  # bytes
    num_bytes: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: tuple[int, ...]  # one per block


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint, put together from its pieces.

    Up to ``max_padding`` of its last rows may be padding of the vocabulary.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Any, ...]  # a format's own; they have ``offset`` and ``shape``
    max_padding: int = 0


class CheckpointReader:
    """One published checkpoint folder.  A context manager; ``close`` closes its files.

    Threads may read from it side by side; reading and checksums give the interpreter free.
    Raises CheckpointDamaged wherever a file is not what was written.  ``verify=False`` leaves out
    the checksums of tensor data, nothing else.
    """

    def __init__(self, folder: str | Path, *, verify: bool = True):
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise CheckpointDamaged(f"{self.folder / MANIFEST} is missing")
        self.manifest = manifest
        index = json.loads(read_checked(self.folder, INDEX, self.manifest))
        try:
            self.tensors: dict[str, StoredTensor] = {
                key: _stored_tensor(entry) for key, entry in index["tensors"].items()
            }
            self._block_bytes: int = index["block_bytes"]
        except (KeyError, TypeError, AttributeError):
            raise CheckpointDamaged(
                f"{self.folder / INDEX} is damaged: it is no index of tensors"
            ) from None
        self._verify = verify
        self._files: dict[str, int] = {}
        self._held: dict[tuple[str, int], tuple[torch.dtype, tuple[int, ...]]] = {}
        self._opening = threading.Lock()

    def common(self) -> dict[str, Any]:
        """What is no tensor and the same for all ranks."""
        values: dict[str, Any] = json.loads(read_checked(self.folder, COMMON, self.manifest))
        return values

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What only ``rank`` of the writing run knew; None if that was not saved."""
        name = rank_state_name(rank)
        if name not in self.manifest.files:
            return None
        values: dict[str, Any] = json.loads(read_checked(self.folder, name, self.manifest))
        return values

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
        """A whole tensor, in memory, with the dtype it was saved with."""
        stored = self._stored(key)
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_box(key, (0,) * len(stored.shape), out)
        return out

    def load(self, wanted: ShardedTensor, *, cast: bool = False) -> None:
        """Fill the views of ``wanted`` in place.

        Raises CheckpointError if the tensor is missing or has another shape, or another dtype and
        not ``cast``.
        """
        stored = self._stored(wanted.key)
        problem = mismatch(wanted, stored, cast=cast)
        if problem:
            raise CheckpointError(f"{self.folder}: {problem}")
        for piece in wanted.pieces:
            piece.fill(partial(self.read_box, wanted.key, piece.offset))

    @torch.no_grad()
    def read_box(self, key: str, offset: tuple[int, ...], out: Tensor) -> None:
        """Fill ``out`` with the box of its shape at ``offset``, converting to its dtype."""
        stored = self._stored(key)
        filled = 0
        for piece in stored.pieces:
            common = _overlap(piece, offset, tuple(out.shape))
            if common is None:
                continue
            in_piece, in_out = common
            target = out[in_out] if in_out else out
            self._read_overlap(piece, stored.dtype, in_piece, target)
            filled += target.numel()
        if filled != out.numel():
            raise CheckpointError(
                f"{self.folder}: {out.numel() - filled} elements of {key} are in none of its files"
            )

    def close(self) -> None:
        """Close the open files; the reader can still be used."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stored(self, key: str) -> StoredTensor:
        stored = self.tensors.get(key)
        if stored is None:
            raise CheckpointError(f"{self.folder} holds no tensor {key}")
        return stored

    def _read_overlap(self, piece: Any, dtype: torch.dtype, box: Box, target: Tensor) -> None:
        """Copy ``box`` of ``piece`` into ``target``; straight into it where its memory allows."""
        self._check_held(piece, dtype)
        strides = _strides(piece.shape)
        first = sum(s.start * stride for s, stride in zip(box, strides, strict=True))
        last = sum((s.stop - 1) * stride for s, stride in zip(box, strides, strict=True))
        count = last + 1 - first
        is_dense = count == target.numel() and target.is_contiguous()
        direct = is_dense and target.dtype == dtype and not device.is_cuda(target.device)
        buffer = target if direct else torch.empty(count, dtype=dtype)
        self._read_bytes(piece, first * dtype.itemsize, bytes_of(buffer))
        if not direct:
            target.copy_(buffer.as_strided(target.shape, strides))

    def _check_held(self, piece: StoredPiece, dtype: torch.dtype) -> None:
        """Compare what the index says with what the header of the file does."""
        self._open(piece.file)
        num_blocks = -(-piece.num_bytes // self._block_bytes)
        if (
            self._held.get((piece.file, piece.start)) != (dtype, piece.shape)
            or piece.num_bytes != prod(piece.shape) * dtype.itemsize
            or len(piece.crc32) != num_blocks
        ):
            raise CheckpointDamaged(
                f"{self.folder / INDEX} is damaged: {_short(dtype)} {list(piece.shape)} is not "
                f"what {piece.file} holds at byte {piece.start}"
            )

    def _read_bytes(self, piece: StoredPiece, begin: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``begin`` of ``piece``, verifying each block that is touched."""
        file = self._open(piece.file)
        if not self._verify:
            self._pread(file, piece, begin, out)
            return
        end = begin + len(out)
        size = self._block_bytes
        for i in range(begin // size, -(-end // size)):
            block_begin, block_end = i * size, min((i + 1) * size, piece.num_bytes)
            is_inside = begin <= block_begin and block_end <= end
            if is_inside:
                block = out[block_begin - begin : block_end - begin]
            else:
                block = memoryview(bytearray(block_end - block_begin))
            self._pread(file, piece, block_begin, block)
            if crc32(block) != piece.crc32[i]:
                raise CheckpointDamaged(
                    f"{self.folder / piece.file} is damaged: block {i} of the tensor at byte "
                    f"{piece.start} does not fit its checksum"
                )
            if not is_inside:
                low, high = max(begin, block_begin), min(end, block_end)
                out[low - begin : high - begin] = block[low - block_begin : high - block_begin]

    def _pread(self, file: int, piece: StoredPiece, begin: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(file, [out[done:]], piece.start + begin + done)
            if count == 0:
                raise CheckpointDamaged(f"{self.folder / piece.file} ends too early")
            done += count

    def _open(self, name: str) -> int:
        """Descriptor of a data file, whose size and header are checked the first time."""
        with self._opening:
            if name not in self._files:
                data = read_checked(self.folder, name, self.manifest)
                rest = self.manifest.files[name].num_bytes - len(data)
                held = parse_header(self.folder / name, data[LENGTH_BYTES:], rest)
                for tensor in held.values():
                    self._held[name, tensor.start] = tensor.dtype, tensor.shape
                self._files[name] = os.open(self.folder / name, os.O_RDONLY)
            return self._files[name]


def mismatch(wanted: ShardedTensor, stored: StoredTensor, *, cast: bool) -> str | None:
    """Why ``stored`` cannot fill ``wanted``: a sentence with both shapes or dtypes, or None."""
    shape, have = wanted.global_shape, stored.shape
    is_padded = have[1:] == shape[1:] and 0 < sum(have[:1]) - sum(shape[:1]) <= stored.max_padding
    if shape != have and not is_padded:
        return (
            f"{wanted.key} has shape {list(stored.shape)} in the checkpoint "
            f"and {list(wanted.global_shape)} in this run"
        )
    if wanted.dtype != stored.dtype and not cast:
        return (
            f"{wanted.key} has dtype {_short(stored.dtype)} in the checkpoint "
            f"and {_short(wanted.dtype)} in this run"
        )
    return None


def _stored_tensor(entry: Mapping[str, Any]) -> StoredTensor:
    pieces = tuple(
        StoredPiece(
            piece["file"],
            piece["start"],
            piece["num_bytes"],
            tuple(piece["offset"]),
            tuple(piece["shape"]),
            tuple(piece["crc32"]),
        )
        for piece in entry["pieces"]
    )
    return StoredTensor(tuple(entry["shape"]), DTYPES[entry["dtype"]], pieces)


def _overlap(piece: Any, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Box, Box] | None:
    """Slices of the piece and of the wanted box that cover what they share."""
    in_piece, in_out = [], []
    for have, extent, want, length in zip(piece.offset, piece.shape, offset, shape, strict=True):
        low, high = max(have, want), min(have + extent, want + length)
        if low >= high:
            return None
        in_piece.append(slice(low - have, high - have))
        in_out.append(slice(low - want, high - want))
    return tuple(in_piece), tuple(in_out)


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Row-major strides in elements."""
    return [prod(shape[d + 1 :]) for d in range(len(shape))]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
