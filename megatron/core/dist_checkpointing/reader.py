"""Read a checkpoint folder: any box of any tensor, reading only the bytes that contain it.

Needs only the folder: no process group, no model.  Every block is compared with its checksum before
its values are used.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import JsonObject
from megatron.core.dist_checkpointing.manifest import (
    COMMON,
    INDEX,
    MANIFEST,
    SAVE,
    check_size,
    crc32,
    json_object,
    rank_state_name,
    read_checked,
    read_manifest,
    reading,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.safetensors_file import (
    LENGTH_BYTES,
    bytes_of,
    parse_header,
    piece_name,
)
from megatron.core.dist_checkpointing.stored_index import (
    StoredBox,
    StoredPiece,
    StoredTensor,
    check_pieces,
    parse_index,
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
        self._entries: dict[tuple[str, str], tuple[torch.dtype, tuple[int, ...], int]] = {}
        self._opening = threading.Lock()

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

    def load(self, wanted: ShardedTensor, *, cast: bool = False) -> None:
        """Fill the views of ``wanted`` in place.

        Raises CheckpointError if the tensor is missing, its shape differs, or its dtype differs and
        ``cast`` is False.
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
        if key not in self._whole:
            check_pieces(key, stored.pieces, self.folder)
            self._whole.add(key)
        filled = 0
        for piece in stored.pieces:
            common = _overlap(piece, offset, tuple(out.shape))
            if common is None:
                continue
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
        self._check_held(key, stored, piece)
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

    def _check_held(self, key: str, stored: StoredTensor, piece: StoredPiece) -> None:
        """Compare the index with the header of the file."""
        self._open(piece.file)
        name = piece_name(key, stored.shape, piece.offset, piece.shape)
        if self._entries.get((piece.file, name)) != (stored.dtype, piece.shape, piece.start):
            raise CheckpointDamaged(
                f"{self.folder / INDEX} is damaged: {_short(stored.dtype)} {name} is not what "
                f"{piece.file} holds at byte {piece.start}"
            )

    def _read_bytes(self, piece: StoredPiece, begin: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``begin`` of ``piece``, verifying each block that is touched."""
        file = self._open(piece.file)
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
            with reading(self.folder / piece.file):
                count = os.preadv(file, [out[done:]], piece.start + begin + done)
            if count == 0:
                raise CheckpointDamaged(f"{self.folder / piece.file} ends too early")
            done += count

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


def mismatch(wanted: ShardedTensor, stored: StoredTensor, *, cast: bool) -> str | None:
    """Return an error message if ``stored`` cannot fill ``wanted`` (shape or dtype), else None."""
    shape, have = wanted.global_shape, stored.shape
    if shape != have and not _is_padded(wanted, stored):
        hint = ""
        if stored.max_padding and have[1:] == shape[1:] and have[0] > shape[0]:
            extra = have[0] - shape[0]
            hint = f" (with --padded-vocab-size {have[0]} if the last {extra} rows are padding)"
        return (
            f"{wanted.key} has shape {list(stored.shape)} in the checkpoint "
            f"and {list(wanted.global_shape)} in this run{hint}"
        )
    if wanted.dtype != stored.dtype and not cast:
        return (
            f"{wanted.key} has dtype {_short(stored.dtype)} in the checkpoint "
            f"and {_short(wanted.dtype)} in this run"
        )
    return None


def _is_padded(wanted: ShardedTensor, stored: StoredTensor) -> bool:
    """Return whether ``stored`` is ``wanted`` with vocabulary padding at its end.

    Padding that is as large as this run's own is accepted even beyond ``max_padding``, which is an
    estimate for checkpoints that do not store the size of the vocabulary.
    """
    have = stored.shape
    shape = wanted.global_shape
    if not stored.max_padding or have[1:] != shape[1:]:
        return False
    return 0 < have[0] - shape[0] <= stored.max_padding or have[0] == wanted.padded_rows


def _overlap(
    piece: StoredBox, offset: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Box, Box] | None:
    """Return the slices of the piece and of the wanted box that cover their overlap, or None."""
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
