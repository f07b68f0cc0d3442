"""Check of mbridge: python -m tools.dev.lib.library_mbridge MODEL FOLDER [TP PP]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from mbridge import AutoBridge

from tools.dev.lib import emulated_cuda
from tools.dev.lib.library_models import Reference, differing, dtype_of
from tools.dev.lib.library_steps import Training, done, start


def main(model_name: str, folder: Path, tp: int = 1, pp: int = 1) -> None:
    """Build, load, compare, train, save, load and export."""
    emulated_cuda.emulate()
    start(tp, pp)
    path = folder / model_name
    dtype = dtype_of(model_name)
    bridge = AutoBridge.from_pretrained(path, dtype=dtype)
    chunks = bridge.get_model(bf16=dtype == torch.bfloat16, wrap_with_ddp=True)
    done("build")
    bridge.load_weights(chunks, str(path))
    done("load")

    @torch.no_grad()
    def exported() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in bridge.export_weights(chunks)}

    different = differing(path, exported())
    if different:
        raise ValueError(f"exported tensors differ: {different}")
    done("export")
    training = Training(chunks, Reference(path, dtype), exported)
    training.compare_logits()
    training.take_steps()
    training.save_and_load(folder / f"checkpoint_{model_name}_{tp}_{pp}")
    written = folder / f"exported_{model_name}_{tp}_{pp}"
    bridge.save_weights(chunks, str(written))
    done("write files")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
