"""Choose the checkpoint that a run loads."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import RELEASE, TRACKER, CheckpointChoice
from megatron.training.checkpointing.non_persistent import newer_transient
from megatron.training.checkpointing.paths import find, is_same_directory
from megatron.training.config.checkpoint import CheckpointConfig


class Source(TypedDict):
    """The checkpoint that rank 0 chose; the other ranks receive it as JSON."""

    root: str
    folders: list[str]  # to try, in order
    num_transient: int  # how many of the first are non-persistent checkpoints
    note: str | None
    is_finetuning: bool
    weights_only: bool  # neither optimizer nor counters: --finetune, or a release


def choose_source(config: CheckpointConfig) -> Source | None:
    """Choose the checkpoint to load; None if the run starts from random weights.  Local.

    Raises CheckpointError, OSError.
    """
    if config.moe_use_upcycling and config.save and find(config.save, None) is not None:
        raise CheckpointError(
            f"--moe-use-upcycling: --save {config.save} holds a checkpoint already; go on from "
            "it with --load and without the flag, or save elsewhere"
        )
    choice = find(config.load, config.ckpt_step, lenient=config.load_newest_valid)
    newer = newer_transient(config, choice)
    if newer is not None:
        kept = () if choice is None else (choice.found, *choice.older)
        note = f"loading the non-persistent checkpoint {newer.folder}, the newest one"
        choice = CheckpointChoice(newer, kept, note)
    if choice is not None:
        assert config.load is not None
        num_transient = int(newer is not None)
        return _source(config.load, choice, config.finetune, num_transient)
    if config.pretrained_checkpoint is not None:
        choice = find(config.pretrained_checkpoint, None)
        if choice is None:
            raise CheckpointError(
                f"--pretrained-checkpoint {config.pretrained_checkpoint} holds no checkpoint"
            )
        return _source(config.pretrained_checkpoint, choice, is_finetuning=True)
    if config.exit_on_missing_checkpoint:
        lack = (
            "--load is not given" if config.load is None else f"{config.load} holds no checkpoint"
        )
        raise CheckpointError(f"--exit-on-missing-checkpoint: {lack}")
    if config.load is None:
        return None
    if not is_same_directory(config.load, config.save):
        raise CheckpointError(
            f"--load {config.load} holds no checkpoint: correct the path; to start from "
            "random weights and resume later, give --load and --save the same directory"
        )
    print(
        f"WARNING: could not find the metadata file {Path(config.load) / TRACKER}\n"
        "    will not load any checkpoints and will start from random",
        flush=True,
    )
    return None


def _source(
    root: str, choice: CheckpointChoice, is_finetuning: bool, num_transient: int = 0
) -> Source:
    return {
        "root": root,
        "folders": [str(found.folder) for found in (choice.found, *choice.older)],
        "num_transient": num_transient,
        "note": choice.note,
        "is_finetuning": is_finetuning,
        "weights_only": is_finetuning or choice.found.folder.name == RELEASE,
    }
