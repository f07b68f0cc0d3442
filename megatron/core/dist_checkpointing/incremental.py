"""--ckpt-incremental: write constant (untrained) tensors once, then hard-link their file.

Constant tensors are in a separate file.  It is linked into the new checkpoint if each of its pieces
has the 128-bit hash in the index of the newest checkpoint.  Hard links share their data: deleting a
checkpoint removes one name.  Loading verifies the checksums as usual.
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
    PieceEntry,
    TensorEntry,
    json_object,
    read_checked,
    read_manifest,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.safetensors_file import DTYPE_NAMES, bytes_of


def hashes_of(tensors: Sequence[ShardedTensor]) -> dict[str, list[str]]:
    """Return, by key, the first 128 bits of the SHA-256 of each piece, in hex."""
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
    """Link the file of the newest checkpoint beside ``folder`` that has exactly these pieces.

    Returns their index entries and the file's entry.  Returns None if there is no such file or it
    cannot be linked; the caller then writes the tensors.
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
    """Return the stored pieces that match ``tensor``, in its order; KeyError if one is missing."""
    if stored["dtype"] != DTYPE_NAMES[tensor.dtype]:
        raise KeyError(tensor.key)
    known = {
        (tuple(p["offset"]), tuple(p["shape"]), p.get("sha256_128")): p for p in stored["pieces"]
    }
    wanted = zip(tensor.pieces, hashes, strict=True)
    return [known[piece.offset, piece.shape, hash] for piece, hash in wanted]
