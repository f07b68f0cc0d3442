"""Save the state of an external data loader beside the checkpoints (--dataloader-save).

The files are those of Megatron-LM: ``iter_N/mp_rank_00[_000]/train_dataloader_dprankNNN.pt`` holds
``{"dataloader_state_dict": loader.save_state()}``.  The program that brings the loader restores it,
because only its package knows the types of the state.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron.training.checkpointing.paths import checkpoint_folder
from megatron.training.runtime.context import RunContext


def save_loader_state(run: RunContext, loader: Any) -> None:
    """Write the loader's state after the micro-batches of this step, if --dataloader-save is set.

    ``loader``: of the program, or None.
    One rank of each data-parallel replica writes: the one that reads for the first stage.  Called
    before the checkpoint is published, so that a published checkpoint has its state.
    """
    folder = run.config.data.dataloader_save
    groups = run.groups
    is_reader = groups.tp.rank() == 0 and groups.pp.rank() == 0 and groups.cp.rank() == 0
    if folder is None or loader is None or not is_reader:
        return
    stage = "mp_rank_00" + ("_000" if groups.pp.size() > 1 else "")
    name = f"train_dataloader_dprank{groups.dp.rank():03d}.pt"
    path = Path(checkpoint_folder(folder, run.state.iteration)) / stage / name
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        torch.save({"dataloader_state_dict": loader.save_state()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
