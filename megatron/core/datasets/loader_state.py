"""State of an external data loader in a file, as Megatron-LM writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def write_loader_state(loader: Any, path: Path) -> None:
    """Write ``{"dataloader_state_dict": loader.save_state()}`` to ``path``, or nothing at all.

    The state is pickled, because only the loader's package knows its types; it is never read here.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save({"dataloader_state_dict": loader.save_state()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
