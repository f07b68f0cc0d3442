"""Writes PyTorch's distributed checkpoint files, so that torch and Megatron-LM load them.

A rank writes one ``__{rank}_0.distcp``, an archive of torch.save behind the other; rank 0 writes
``.metadata`` when all have.  What a rank reports of a box: key, shape of the whole, place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import torch
from torch import Size, Tensor

from megatron.core.diagnostics.fault_injection import fault_point, flipped
from megatron.core.dist_checkpointing.manifest import METADATA, FileEntry, adopt_file
from megatron.core.dist_checkpointing.megatron_formats.pickler import (
    Named,
    compact,
    named,
    pickled,
    write_archive,
)
from megatron.core.dist_checkpointing.value_types import PieceEntry, PlaceEntry, TensorEntry

_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
    name: named(f"{_CHECKPOINT}.{module}", name)
    for module, names in {
        "metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
        "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
        "filesystem": "_StorageInfo",
    }.items()
    for name in names.split()
}
_VERSION = "1.0.0"


class DcpFile:
    """A data file that is being written, a box or an object behind the other."""

    def __init__(self, folder: Path, rank: int, number: int, step: int) -> None:
        self.name, self._step = f"__{rank}_{number}.distcp", step
        self._file = open(folder / self.name, "wb")  # noqa: SIM115 - closed by `close`

    def add(self, value: object) -> PlaceEntry:
        """Append a tensor or an object; where it lies."""
        flips = fault_point("save.tensor", step=self._step) == "bitflip"
        start = self._file.tell()
        buffer = BytesIO()
        write_archive(buffer, compact(value) if isinstance(value, Tensor) else value)
        self._file.write(flipped(buffer.getvalue()) if flips else buffer.getbuffer())
        return {"file": self.name, "start": start, "num_bytes": self._file.tell() - start}

    def add_box(self, values: Tensor, offset: Sequence[int]) -> PieceEntry:
        """Append the box of a tensor that begins at ``offset``."""
        place = self.add(values)
        return {
            "file": place["file"],
            "start": place["start"],
            "num_bytes": place["num_bytes"],
            "offset": list(offset),
            "shape": list(values.shape),
        }

    def close(self) -> FileEntry:
        """Fsync; the file as the manifest has it, which leaves its records to their checksums."""
        fault_point("save.before_fsync", step=self._step)
        self._file.flush()
        os.fsync(self._file.fileno())
        num_bytes = self._file.tell()
        self._file.close()
        return FileEntry(num_bytes, 0, 0)


def write_metadata(
    folder: Path,
    tensors: Mapping[str, TensorEntry],
    objects: Mapping[str, PlaceEntry],
    *,
    paths: Mapping[str, tuple[object, ...]] | None = None,
    unflattened: Mapping[str, tuple[int, ...]] | None = None,
) -> FileEntry:
    """Write and fsync ``.metadata``.

    ``paths``: where a key stands in nested dictionaries; ``unflattened``: see `torch_dist`, None
    for a plain checkpoint of torch.
    """
    entries: dict[str, Named] = {}
    places: dict[Named, Named] = {}
    for key, entry in tensors.items():
        chunks = [
            _new("ChunkStorageMetadata", offsets=Size(p["offset"]), sizes=Size(p["shape"]))
            for p in entry["pieces"]
        ]
        entries[key] = _new(
            "TensorStorageMetadata",
            properties=_properties(getattr(torch, entry["dtype"])),
            size=Size(entry["shape"]),
            chunks=chunks,
        )
        for piece in entry["pieces"]:
            index = _new("MetadataIndex", fqn=key, offset=Size(piece["offset"]), index=None)
            places[index] = _place(piece)
    for key, place in objects.items():
        entries[key] = _CLASSES["BytesStorageMetadata"](state={})
        places[_new("MetadataIndex", fqn=key, offset=None, index=None)] = _place(place)
    storage = _new("StorageMeta", checkpoint_id=None, save_id=None, load_id=None, modules=[])
    state: dict[str, object] = {
        "state_dict_metadata": entries,
        "planner_data": paths,
        "storage_data": places,
        "storage_meta": storage,
        "version": _VERSION,
    }
    if unflattened is not None:
        state["mcore_data"] = {
            key: {"nd_reformulated_orig_global_shape": unflattened[key]}
            if key in unflattened
            else {}
            for key in tensors
        }
    (folder / METADATA).write_bytes(pickled(_new("Metadata", **state)))
    return adopt_file(folder / METADATA)


def _new(name: str, **state: object) -> Named:
    return _CLASSES[name](state=state)


def _properties(dtype: torch.dtype) -> Named:
    contiguous = _CLASSES["_MEM_FORMAT_ENCODING"](args=(0,))
    state = (dtype, torch.strided, False, contiguous, False)
    return _CLASSES["TensorProperties"](state=state)


def _place(piece: PlaceEntry) -> Named:
    return _new(
        "_StorageInfo",
        relative_path=piece["file"],
        offset=piece["start"],
        length=piece["num_bytes"],
        transform_descriptors=None,
    )
