"""--ckpt-incremental: tensors that nobody trains are written once and linked from then on.

They lie in a file of their own.  It is linked into the new checkpoint if every one of its pieces
has the 128-bit hash that the index of the newest checkpoint holds.  The links share their data:
deleting a checkpoint deletes a name, and what is loaded is verified by its checksums as ever.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import folder_name, read_tracker
from megatron.core.dist_checkpointing.manifest import (
    INDEX,
    json_object,
    read_checked,
    read_manifest,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.safetensors_file import DTYPE_NAMES, bytes_of

HASH = "sha256_128"  # field of a piece in the index: the first 128 bits, as hex digits


def hashes_of(tensors: Sequence[ShardedTensor]) -> dict[str, list[str]]:
    """Key -> hash of the bytes of each piece, as they lie in the file."""
    return {
        tensor.key: [
            hashlib.sha256(bytes_of(piece.data.to(tensor.dtype))).hexdigest()[:32]
            for piece in tensor.pieces
        ]
        for tensor in tensors
    }


def link_unchanged(
    folder: Path, name: str, tensors: Sequence[ShardedTensor], hashes: Mapping[str, list[str]]
) -> tuple[dict[str, Any], dict[str, int]] | None:
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
        index = json_object(data, str(previous / INDEX))["tensors"]
        found = {t.key: _pieces(index.get(t.key), t, hashes[t.key]) for t in tensors}
        files = {piece["file"] for pieces in found.values() for piece in pieces or [{"file": None}]}
        if len(files) != 1 or None in files:
            return None
        (old,) = files
        read_checked(previous, old, manifest)
        os.link(previous / old, folder / name)
    except (OSError, CheckpointError, AttributeError, KeyError, TypeError):
        return None
    entries = {
        t.key: index[t.key] | {"pieces": [piece | {"file": name} for piece in found[t.key] or ()]}
        for t in tensors
    }
    return entries, asdict(manifest.files[old])


def _pieces(
    stored: Mapping[str, Any] | None, tensor: ShardedTensor, hashes: Sequence[str]
) -> list[dict[str, Any]] | None:
    """The stored pieces that are those of ``tensor``, in its order; None if one is not there."""
    if stored is None or stored["dtype"] != DTYPE_NAMES[tensor.dtype]:
        return None
    known = {(tuple(p["offset"]), tuple(p["shape"]), p.get(HASH)): p for p in stored["pieces"]}
    wanted = [(p.offset, p.shape, h) for p, h in zip(tensor.pieces, hashes, strict=True)]
    return [known[key] for key in wanted] if all(key in known for key in wanted) else None
