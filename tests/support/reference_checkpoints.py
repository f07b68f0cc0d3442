"""The checkpoints that the reference wrote, unpacked for a test."""

from __future__ import annotations

import tarfile
from pathlib import Path

_PACKED = Path(__file__).parents[1] / "golden" / "reference_run" / "checkpoints.tar.xz"
ITERATION = "iter_0000005"


def unpack(folder: Path, name: str) -> Path:
    """Checkpoint directory ``name`` (gpt_torch, gpt_torch_dist, gpt_torch_tp2pp2_distopt)."""
    with tarfile.open(_PACKED) as packed:
        members = [m for m in packed.getmembers() if m.name.split("/")[0] == name]
        packed.extractall(folder, members, filter="data")
    for path in (folder / name).rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder / name
