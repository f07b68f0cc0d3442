"""Write PyTorch distributed checkpoint files, which torch and Megatron-LM can load.

A rank writes one ``__{rank}_0.distcp``, a sequence of torch.save archives.  Rank 0 writes
``.metadata`` after all ranks have written, from their reports of each box: key, global shape,
position in the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import torch
from torch import Size, Tensor

from megatron.core.diagnostics.fault_injection import fault_point, flipped
from megatron.core.dist_checkpointing.manifest import (
    METADATA,
    FileEntry,
    PieceEntry,
    PlaceEntry,
    TensorEntry,
    adopt_file,
)
from megatron.core.dist_checkpointing.megatron_formats.pickler import (
    Named,
    compact,
    named,
    pickled,
    write_archive,
)

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
    """A data file being written, as a sequence of boxes and objects."""

    def __init__(self, folder: Path, rank: int, number: int, step: int) -> None:
        self.name, self._step = f"__{rank}_{number}.distcp", step
        self._file = open(folder / self.name, "wb")  # noqa: SIM115 - closed by `close`

    def add(self, value: object) -> PlaceEntry:
        """Append a tensor or an object; return its position."""
        flips = fault_point("save.tensor", step=self._step) == "bitflip"
        start = self._file.tell()
        buffer = BytesIO()
        write_archive(buffer, compact(value) if isinstance(value, Tensor) else value)
        self._file.write(flipped(buffer.getvalue()) if flips else buffer.getbuffer())
        return {"file": self.name, "start": start, "num_bytes": self._file.tell() - start}

    def add_box(self, values: Tensor, offset: Sequence[int]) -> PieceEntry:
        """Append the box of a tensor that begins at ``offset``; return its index entry."""
        place = self.add(values)
        return {
            "file": place["file"],
            "start": place["start"],
            "num_bytes": place["num_bytes"],
            "offset": list(offset),
            "shape": list(values.shape),
        }

    def close(self) -> FileEntry:
        """Fsync and close the file; return its manifest entry.

        The entry has the size but no checksum of the contents: each torch.save archive has its own.
        """
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

    ``paths``: path of a key in the nested dictionaries.  ``unflattened``: original shapes of
    flattened tensors (`torch_dist`), None for a plain torch checkpoint.
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
