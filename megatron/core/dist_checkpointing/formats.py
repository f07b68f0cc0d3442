"""Formats of ``--ckpt-format``; the files of ``safetensors_dist`` and how ranks write them.

    __{rank}_0.safetensors   tensors that the rank wrote, one or more boxes of each
    __{rank}_state.json      state of one rank: its random number generators
    index.json               key -> global shape, dtype, boxes (file, position, crc32 per block)
    common.json              values other than tensors, equal on all ranks
    config.yaml              the resolved configuration, if the caller passes it
    metadata.json            the manifest, written last: a folder without it is not a checkpoint

The manifest contains the size and checksum of every other file, and a checksum of itself.  For a
data file it covers the header; the index has the checksums of the data.  No file is a pickle.
Nothing in this module communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

from torch import Tensor

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing.manifest import (
    COMMON,
    COMMON_FILE,
    FORMAT,
    INDEX,
    MANIFEST,
    METADATA,
    Common,
    FileEntries,
    FileEntry,
    Layout,
    TensorEntries,
    TensorEntry,
    rank_state_name,
    read_json,
    write_json,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.dist_checkpointing.records import LazyPiece, Piece, TensorRecord, TensorRecords
from megatron.core.dist_checkpointing.safetensors_file import (
    BLOCK_BYTES,
    DTYPE_NAMES,
    LazyTensor,
    piece_name,
    write_file,
)
from megatron.core.registry import Registry


@dataclass(frozen=True)
class RankReport:
    """Result of one rank's writing: index entries, files, and extra objects of the format.

    ``error``: why it could not write.
    """

    tensors: TensorEntries = field(default_factory=dict)
    files: FileEntries = field(default_factory=dict)
    objects: JsonObject = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def from_json(cls, values: JsonObject) -> RankReport:
        """Rebuild a report from ``asdict(report)``."""
        files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        return cls(**{**values, "files": files})


def files_of(reports: Iterable[RankReport]) -> FileEntries:
    """Merge the file entries of all ranks."""
    return {name: entry for report in reports for name, entry in report.files.items()}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """One rank's contents of a checkpoint.  ``common`` and the fields after it: rank 0 only.

    ``write_config(path)`` writes the resolved configuration to ``path``.
    """

    tensors: TensorRecords
    rank_state: JsonObject | None = None
    common: Common = field(default_factory=dict)
    layout: Layout = field(default_factory=dict)
    write_config: Callable[[Path], object] | None = None


@dataclass(frozen=True, kw_only=True)
class RankSave:
    """One rank's part of a save into ``folder``: the ``tensors`` that it writes."""

    folder: Path
    rank: int
    tensors: TensorRecords
    contents: Contents
    iteration: int
    attempt: str

    @property
    def arguments(self) -> Arguments:
        """Command line of the run."""
        arguments: Arguments = self.contents.common.get("args", {})
        return arguments


@dataclass(frozen=True)
class Format:
    """Callbacks that write the files of a checkpoint format; the rest of a save is common.

    ``write_rank_files`` writes and fsyncs one rank's files.  It does not communicate and reads only
    its argument, so it may run in a thread.
    ``write_common_files(folder, reports, common)`` runs on rank 0, writes the files that need the
    reports of all ranks, and returns their entries.  The manifest is written after it.  Both raise
    OSError and CheckpointError.
    ``is_foreign``: the format of another program, with vocabulary padding and its command line.
    ``num_copies``: how many copies of the tensors are on disk at a time during a save.
    """

    name: str
    write_rank_files: Callable[[RankSave], RankReport]
    write_common_files: Callable[[Path, Sequence[RankReport], Common], FileEntries]
    is_foreign: bool = False
    num_copies: int = 1


def write_rank_files(rank_save: RankSave) -> RankReport:
    """Write and fsync the files of one rank.  Not collective.  Raises OSError, CheckpointError."""
    rank, report = rank_save.rank, RankReport()
    # Descending element size keeps every element aligned in the file.
    ordered = sorted(rank_save.tensors, key=lambda t: (-t.dtype.itemsize, t.key))
    boxes = [(tensor, piece) for tensor in ordered for piece in tensor.pieces]
    for tensor in ordered:
        report.tensors[tensor.key] = {
            "shape": list(tensor.global_shape),
            "dtype": DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)),
            "pieces": [],
        }
    if boxes:
        name = f"__{rank}_0.safetensors"
        named = [
            LazyTensor(
                piece_name(tensor.key, tensor.global_shape, piece.offset, piece.shape),
                tensor.dtype,
                piece.shape,
                partial(_values, tensor, piece),
            )
            for tensor, piece in boxes
        ]
        origin = {"iteration": str(rank_save.iteration), "attempt": rank_save.attempt, "file": name}
        report.files[name], places = write_file(
            rank_save.folder / name, named, {"format": "pt", **origin}, rank_save.iteration
        )
        for (tensor, piece), place in zip(boxes, places, strict=True):
            box = {"file": name, "offset": list(piece.offset), "shape": list(piece.shape)}
            report.tensors[tensor.key]["pieces"].append({**box, **place})
    if (state := rank_save.contents.rank_state) is not None:
        name = rank_state_name(rank)
        report.files[name] = write_json(rank_save.folder / name, state)
    return report


def _values(tensor: TensorRecord, piece: Piece | LazyPiece) -> Tensor:
    """Return the values of ``piece`` in the dtype of the file."""
    return piece.data.to(tensor.dtype)


def write_common_files(
    folder: Path, reports: Sequence[RankReport], common: Common, *, is_whole: bool = True
) -> FileEntries:
    """Write and fsync the index and the common values.

    ``is_whole``: raise CheckpointError if an element of a tensor is missing.
    """
    index = merge_index((report.tensors for report in reports), is_whole=is_whole)
    return {INDEX: write_json(folder / INDEX, index), COMMON: write_json(folder / COMMON, common)}


SAFETENSORS_DIST = Format(FORMAT, write_rank_files, write_common_files)


def merge_index(reports: Iterable[TensorEntries], *, is_whole: bool = True) -> dict[str, object]:
    """Merge the ``tensors`` of all ranks' reports into one index.

    Raises CheckpointError unless every element of every tensor was written exactly once.  Without
    ``is_whole`` (one part of a local checkpoint) this is not checked.
    """
    merged = merge_tensors(reports)
    for key, entry in merged.items() if is_whole else ():
        check_written_once(key, entry)
    return {"block_bytes": BLOCK_BYTES, "tensors": dict(sorted(merged.items()))}


def merge_tensors(reports: Iterable[TensorEntries]) -> TensorEntries:
    """Merge the entries of all ranks.  Raises CheckpointError if shapes or dtypes differ."""
    merged: TensorEntries = {}
    for tensors in reports:
        for key, mine in tensors.items():
            entry = merged.setdefault(key, {**mine, "pieces": []})
            if (entry["shape"], entry["dtype"]) != (mine["shape"], mine["dtype"]):
                raise CheckpointError(
                    f"{key}: two ranks hold it with shape and dtype "
                    f"{entry['shape']} {entry['dtype']} and {mine['shape']} {mine['dtype']}"
                )
            entry["pieces"] += mine["pieces"]
    return merged


def check_written_once(key: str, entry: TensorEntry) -> None:
    """Raise CheckpointError unless the pieces of an index entry cover its shape exactly once."""
    offsets = [tuple(piece["offset"]) for piece in entry["pieces"]]
    written = sum(prod(piece["shape"]) for piece in entry["pieces"])
    wanted = prod(entry["shape"])
    if len(set(offsets)) < len(offsets) or written > wanted:
        raise CheckpointError(f"{key}: two ranks wrote the same part of it")
    if written < wanted:
        raise CheckpointError(f"{key}: {wanted - written} of its {wanted} elements have no writer")


HUGGING_FACE = "hf"  # a model folder, for which an application may register a reader
_HUGGING_FACE_CONFIG = "config.json"
LIBRARY = "library"  # in the layout of a sharded state dict that `serialization` saved
_HERE = "megatron.core.dist_checkpointing"
FORMATS: Registry[Format] = Registry(
    "--ckpt-format",
    {
        FORMAT: f"{_HERE}.formats:SAFETENSORS_DIST",
        "torch_dist": f"{_HERE}.megatron_formats.dcp_writer:TORCH_DIST",
        "torch": f"{_HERE}.megatron_formats.torch_legacy:TORCH",
        "torch_dcp": f"{_HERE}.megatron_formats.dcp_writer:TORCH_DCP",
        "fsdp_dtensor": f"{_HERE}.megatron_formats.dcp_writer:FSDP_DTENSOR",
    },
)
READERS: Registry[Callable[[Path], CheckpointReader]] = Registry(
    "--ckpt-format",
    {
        FORMAT: f"{_HERE}.reader:CheckpointReader",
        "torch_dist": f"{_HERE}.megatron_formats.torch_dist:TorchDistReader",
        "torch": f"{_HERE}.megatron_formats.torch_legacy:TorchLegacyReader",
        "torch_dcp": f"{_HERE}.megatron_formats.torch_dist:TorchDcpReader",
        LIBRARY: f"{_HERE}.megatron_formats.library:LibraryFiles",
    },
)


def format_of(folder: Path) -> str | None:
    """Return the format of the checkpoint in ``folder``, or None if it is not a checkpoint.

    Reads file names and at most one file.
    """
    try:
        found = read_json(folder / MANIFEST)
    except FileNotFoundError:
        if any(folder.glob("mp_rank_0*")):
            return "torch"
        is_dcp = (folder / METADATA).is_file() and not (folder / COMMON_FILE).is_file()
        if is_dcp:
            return "torch_dcp"
        is_model = HUGGING_FACE in READERS and (folder / _HUGGING_FACE_CONFIG).is_file()
        return HUGGING_FACE if is_model else None
    except CheckpointDamaged:
        return FORMAT  # the reader raises the error
    if isinstance(found, dict) and "sharded_backend" in found:
        return str(found["sharded_backend"])
    return FORMAT


def open_reader(folder: str | Path) -> CheckpointReader:
    """Open the checkpoint in ``folder``, of any format, under this project's keys.

    Raises CheckpointDamaged if a file is missing or differs from what was written,
    CheckpointError for an unsupported format.
    """
    folder = Path(folder)
    found = format_of(folder)
    if found is None:
        is_dcp = any(folder.glob("*.distcp")) and not (folder / COMMON_FILE).is_file()
        raise CheckpointDamaged(f"{folder / (METADATA if is_dcp else MANIFEST)} is missing")
    if found not in READERS:
        raise CheckpointError(
            f"{folder} is a checkpoint of format {found}; supported formats: {', '.join(READERS)}"
        )
    reader = READERS[found](folder)
    return READERS[LIBRARY](folder) if reader.manifest.layout.get(LIBRARY) else reader
