"""--ckpt-incremental: tensors that nobody trains are written once and linked from then on.

They lie in a file of their own.  It is linked into the new checkpoint if every one of its pieces
has the 128-bit hash that the index of the newest checkpoint holds.  The links share their data:
deleting a checkpoint deletes a name, and what is loaded is verified by its checksums as ever.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import folder_name, read_tracker
from megatron.core.dist_checkpointing.manifest import (
    INDEX,
    FileEntry,
    json_object,
    read_checked,
    read_manifest,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.safetensors_file import DTYPE_NAMES, bytes_of
from megatron.core.dist_checkpointing.value_types import PieceEntry, TensorEntry


def hashes_of(tensors: Sequence[ShardedTensor]) -> dict[str, list[str]]:
    """Key -> the first 128 bits of the SHA-256 of each piece, as hex digits."""
    return {
        tensor.key: [
            hashlib.sha256(bytes_of(piece.data.to(tensor.dtype))).hexdigest()[:32]
            for piece in tensor.pieces
        ]
        for tensor in tensors
    }


def link_unchanged(
    folder: Path, name: str, tensors: Sequence[ShardedTensor], hashes: Mapping[str, list[str]]
) -> tuple[dict[str, TensorEntry], FileEntry] | None:
    """Link the file that holds just these pieces in the newest checkpoint beside ``folder``.

    Returns their part of the index and the file's entry; None if there is no such file, or it
    cannot be linked: then they are to be written.
    """
    try:
        tracker = read_tracker(folder.parent)
        if tracker is None:
            return None
        previous = folder.parent / folder_name(tracker.iteration)
        manifest = read_manifest(previous)
        if manifest is None:
            return None
        data = read_checked(previous, INDEX, manifest)
        index: dict[str, TensorEntry] = json_object(data, str(previous / INDEX))["tensors"]
        found = {t.key: _pieces(index[t.key], t, hashes[t.key]) for t in tensors}
        (old,) = {piece["file"] for pieces in found.values() for piece in pieces}
        read_checked(previous, old, manifest)
        os.link(previous / old, folder / name)
    except (OSError, CheckpointError, AttributeError, KeyError, TypeError, ValueError):
        return None
    entries: dict[str, TensorEntry] = {
        key: {**index[key], "pieces": [{**piece, "file": name} for piece in pieces]}
        for key, pieces in found.items()
    }
    return entries, manifest.files[old]


def _pieces(stored: TensorEntry, tensor: ShardedTensor, hashes: Sequence[str]) -> list[PieceEntry]:
    """The stored pieces that are those of ``tensor``, in its order; KeyError if one is missing."""
    if stored["dtype"] != DTYPE_NAMES[tensor.dtype]:
        raise KeyError(tensor.key)
    known = {
        (tuple(p["offset"]), tuple(p["shape"]), p.get("sha256_128")): p for p in stored["pieces"]
    }
    wanted = zip(tensor.pieces, hashes, strict=True)
    return [known[piece.offset, piece.shape, hash] for piece, hash in wanted]
