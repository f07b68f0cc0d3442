"""The format ``safetensors_dist``: what lies in one checkpoint folder, and how it is written.

    __{rank}_0.safetensors   tensors that the rank wrote, one or more boxes of each
    __{rank}_state.json      what only that rank knows: the states of its random generators
    index.json               key -> global shape, dtype, boxes with file, place and crc32 per block
    common.json              everything that is no tensor and the same for all ranks
    config.yaml              the resolved configuration, where the caller gives one
    metadata.json            the manifest, written last: a folder without it is not a checkpoint

The manifest holds size and checksum of every other file, and a checksum of itself.  Of a data
file it holds the checksum of the header; the data have theirs in the index.  No file is a pickle.
Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import (
    COMMON,
    FORMAT,
    INDEX,
    FileEntry,
    rank_state_name,
    write_json,
)
from megatron.core.dist_checkpointing.mapping import LazyPiece, Piece, ShardedTensor
from megatron.core.dist_checkpointing.safetensors_file import (
    BLOCK_BYTES,
    DTYPE_NAMES,
    LazyTensor,
    write_file,
)


@dataclass(frozen=True)
class RankReport:
    """What one rank wrote: its share of the index, and its files.  Plain JSON values inside."""

    tensors: dict[str, dict[str, Any]]
    files: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Format:
    """How the folder of a checkpoint is filled; all else of a save is the same in every format.

    ``write_rank_files(folder, rank, tensors, rank_state, iteration=, attempt=)`` writes and fsyncs
    what one rank gives, and may run in a thread: local, reads nothing but its arguments.
    ``complete(folder, reports, common)`` adds on rank 0 what needs the reports of all ranks, and
    returns the files it wrote.  The manifest comes behind it.  Both raise OSError, CheckpointError.
    ``is_foreign``: for other programs, with vocabulary padding and their command line.
    """

    name: str
    write_rank_files: Callable[..., RankReport]
    complete: Callable[[Path, Sequence[RankReport], Mapping[str, Any]], Mapping[str, FileEntry]]
    is_foreign: bool = False


def write_rank_files(
    folder: Path,
    rank: int,
    tensors: Sequence[ShardedTensor],
    rank_state: Mapping[str, Any] | None,
    *,
    iteration: int,
    attempt: str,
) -> RankReport:
    """Write and fsync the files of one rank.  Local.  Raises OSError, CheckpointError."""
    report = RankReport(tensors={}, files={})
    # By falling element size every element stays aligned in the file.
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.key))
    boxes = [(tensor, piece) for tensor in ordered for piece in tensor.pieces]
    for tensor in ordered:
        report.tensors[tensor.key] = {
            "shape": list(tensor.global_shape),
            "dtype": DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)),
            "pieces": [],
        }
    if boxes:
        name = f"__{rank}_0.safetensors"
        named = [_lazy(tensor, piece) for tensor, piece in boxes]
        origin = {"format": "pt", "file": name, "iteration": str(iteration), "attempt": attempt}
        done = write_file(folder / name, named, origin, iteration)
        report.files[name] = asdict(FileEntry(done.num_bytes, done.header_bytes, done.header_crc32))
        for (tensor, piece), written in zip(boxes, done.tensors, strict=True):
            place = {"file": name, "offset": list(piece.offset), "shape": list(piece.shape)}
            report.tensors[tensor.key]["pieces"].append(place | asdict(written))
    if rank_state is not None:
        name = rank_state_name(rank)
        report.files[name] = asdict(write_json(folder / name, rank_state))
    return report


def complete(
    folder: Path, reports: Sequence[RankReport], common: Mapping[str, Any]
) -> dict[str, FileEntry]:
    """Write and fsync the index and the common values."""
    index = merge_index(report.tensors for report in reports)
    return {
        INDEX: write_json(folder / INDEX, index),
        COMMON: write_json(folder / COMMON, common),
    }


SAFETENSORS_DIST = Format(FORMAT, write_rank_files, complete)


def merge_index(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One index from the ``tensors`` of all ranks' reports.

    Raises CheckpointError unless every element of every tensor was written exactly once.
    """
    merged: dict[str, dict[str, Any]] = {}
    for tensors in reports:
        for key, mine in tensors.items():
            entry = merged.setdefault(key, {**mine, "pieces": []})
            for field in ("shape", "dtype"):
                if entry[field] != mine[field]:
                    raise CheckpointError(
                        f"{key}: two ranks hold it with {field} {entry[field]} and {mine[field]}"
                    )
            entry["pieces"] += mine["pieces"]
    for key, entry in merged.items():
        check_written_once(key, entry)
    return {"block_bytes": BLOCK_BYTES, "tensors": dict(sorted(merged.items()))}


def check_written_once(key: str, entry: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the pieces of an index entry cover its shape, each once."""
    offsets = [tuple(piece["offset"]) for piece in entry["pieces"]]
    written = sum(prod(piece["shape"]) for piece in entry["pieces"])
    wanted = prod(entry["shape"])
    if len(set(offsets)) < len(offsets) or written > wanted:
        raise CheckpointError(f"{key}: two ranks wrote the same part of it")
    if written < wanted:
        raise CheckpointError(f"{key}: {wanted - written} of its {wanted} elements have no writer")


def _lazy(tensor: ShardedTensor, piece: Piece | LazyPiece) -> LazyTensor:
    """``piece`` in the dtype of the file."""

    def make() -> Tensor:
        return piece.data.to(tensor.dtype)

    return LazyTensor(_piece_name(tensor, piece), tensor.dtype, piece.shape, make)


def _piece_name(tensor: ShardedTensor, piece: Piece | LazyPiece) -> str:
    """The key; with the box where the piece is not the whole tensor: ``key[0:64,32:64]``."""
    if piece.shape == tensor.global_shape:
        return tensor.key
    box = ",".join(f"{o}:{o + n}" for o, n in zip(piece.offset, piece.shape, strict=True))
    return f"{tensor.key}[{box}]"
