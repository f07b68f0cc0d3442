"""Checks of projects that convert weights: python -m tools.dev.lib.library_bridges PACKAGE MODEL...

mbridge, Megatron-Bridge, and mcore-bridge, by which ms-swift trains, build and load a model; what
follows is the same for all.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from tools.dev.lib import supplied_names
from tools.dev.lib.library_models import Reference, dtype_of
from tools.dev.lib.library_steps import Bridged, Training, done, start

# Package -> the module whose ``build`` builds by it, imported when what it needs is supplied.
BUILDERS = {
    "mbridge": "tools.dev.lib.library_mbridge",
    "mcore_bridge": "tools.dev.lib.library_mcore_bridge",
    "megatron.bridge": "tools.dev.lib.library_megatron_bridge",
}


def main(package: str, model: str, folder: Path, tp: int, pp: int) -> None:
    """Build, load, export, compare, train, save, load, and write for transformers."""
    path = folder / model
    dtype = dtype_of(model) if package == "mbridge" else torch.float32
    reference = Reference(path, dtype)  # before a project replaces what transformers calls
    supplied_names.prepare(package)
    start(tp, pp)
    bridged: Bridged = importlib.import_module(BUILDERS[package]).build(path, tp, pp)
    done("load")
    training = Training(bridged, reference)
    training.compare_weights(path)
    done("export")
    training.compare_logits()
    training.take_steps()
    training.save_and_load(folder / f"checkpoint_{model}_{tp}_{pp}")
    written = folder / f"exported_{model}_{tp}_{pp}"
    bridged.write(str(written))
    training.compare_weights(written)
    done("write")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
