"""Formats of ``--ckpt-format``: tables of writers and readers, detection of a folder's format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.dist_checkpointing.format import Format
from megatron.core.dist_checkpointing.manifest import (
    COMMON_FILE,
    FORMAT,
    MANIFEST,
    METADATA,
    read_json,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.lazy import LazyTable

_HERE = "megatron.core.dist_checkpointing"
FORMATS: Mapping[str, Format] = LazyTable(
    {
        FORMAT: f"{_HERE}.format.SAFETENSORS_DIST",
        "torch_dist": f"{_HERE}.megatron_formats.torch_dist_writer.TORCH_DIST",
        "torch": f"{_HERE}.megatron_formats.torch_legacy_writer.TORCH",
        "torch_dcp": f"{_HERE}.megatron_formats.torch_dcp_writer.TORCH_DCP",
        "fsdp_dtensor": f"{_HERE}.megatron_formats.torch_dcp_writer.FSDP_DTENSOR",
    }
)
_READERS: Mapping[str, type[CheckpointReader]] = LazyTable(
    {
        FORMAT: f"{_HERE}.reader.CheckpointReader",
        "torch_dist": f"{_HERE}.megatron_formats.torch_dist.TorchDistReader",
        "torch": f"{_HERE}.megatron_formats.torch_legacy.TorchLegacyReader",
        "torch_dcp": f"{_HERE}.megatron_formats.torch_dcp.TorchDcpReader",
    }
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
        return "torch_dcp" if is_dcp else None
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
    if found not in _READERS:
        raise CheckpointError(
            f"{folder} is a checkpoint of format {found}; supported formats: {', '.join(_READERS)}"
        )
    return _READERS[found](folder)
