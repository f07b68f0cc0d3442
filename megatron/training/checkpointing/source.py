"""Choose the checkpoint that a run loads.

A run starts from the weights of another checkpoint, or it resumes.  It starts if --load gives
weights alone (--finetune, a release, the base of adapters) and for --pretrained-checkpoint.  Its
checkpoints name the folder of those weights, so that the command that started the run continues it:
if the newest checkpoint in --save names the same folder, that one is loaded.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import TRACKER, CheckpointChoice, folder_name
from megatron.core.dist_checkpointing.formats import HUGGING_FACE, format_of
from megatron.training.checkpointing.base_model import base_named_in
from megatron.training.checkpointing.non_persistent import newer_transient
from megatron.training.checkpointing.paths import (
    CheckpointContent,
    RunContent,
    find,
    holds_weights_alone,
    is_same_directory,
    read_content,
)
from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.process.rank_print import print_rank_0

# Entry of a checkpoint's command line: the folder whose weights the run started from.
STARTED_FROM = "started_from"


class Source(TypedDict):
    """The checkpoint that rank 0 chose; the other ranks receive it as JSON."""

    root: str
    folders: list[str]  # to try, in order
    num_transient: int  # how many of the first are non-persistent checkpoints
    note: str | None
    is_finetuning: bool
    weights_only: bool  # neither optimizer nor counters: --finetune, or a release


class Start(TypedDict):
    """The weights that a run started from, or starts from now."""

    folder: str
    is_continued: bool  # --save holds a checkpoint of this run


def find_start(config: CheckpointConfig, *, has_adapters: bool) -> Start | None:
    """Return the weights that the run starts from; None if it resumes from --load.  Local.

    None too if --load and --save are one directory, where the newest checkpoint is loaded.
    Raises CheckpointError, OSError; CheckpointError if --save holds a checkpoint of another run.
    """
    is_conversion = config.ckpt_convert_format is not None
    if config.save is None or is_conversion or is_same_directory(config.load, config.save):
        return None
    source = choose_source(config)
    if source is None:
        return None
    folder = Path(source["folders"][0])
    if not source["weights_only"] and not (has_adapters and not holds_adapters(folder)):
        return None
    chosen = str(folder.resolve())
    own = _in_load(continuation(config))
    if own is None:
        return {"folder": chosen, "is_continued": False}
    newest = _newest(own, lenient=config.load_newest_valid)
    named = started_from(newest.common)
    if named != chosen:
        raise CheckpointError(
            f"{newest.folder} belongs to another run, which started from "
            f"{named or 'random weights or an unknown checkpoint'}; this run starts from "
            f"{chosen} and would overwrite it: to continue that run, give --load "
            f"{config.save} without --finetune; otherwise give another --save"
        )
    return {"folder": chosen, "is_continued": True}


def continuation(config: CheckpointConfig) -> CheckpointConfig:
    """Return the flags that continue the run in --save: without those that describe a start."""
    return replace(
        config,
        load=config.save,
        finetune=False,
        ckpt_step=None,
        moe_use_upcycling=False,
        no_load_optim=config.no_save_optim,
        no_load_rng=config.no_save_rng,
        load_main_params_from_ckpt=False,
    )


def describe_start(config: CheckpointConfig, start: Start | None) -> str | None:
    """Return the log line that says what this command does now, and what it does when repeated.

    None for --load and --save in one directory, where both are the same.
    """
    if start is not None and start["is_continued"]:
        return f" continuing the run in --save {config.save}, which started from {start['folder']}"
    if start is not None:
        return (
            f" starting from the weights in {start['folder']} at iteration 0; the same command "
            f"continues the run from --save {config.save}"
        )
    if config.load is None or config.save is None:
        return None
    if not is_same_directory(config.load, config.save):
        return (
            f" resuming from --load {config.load}; the same command resumes from there again: to "
            f"continue from --save {config.save}, give --load {config.save}"
        )
    if config.finetune:
        return (
            " --finetune with one directory for --load and --save: starting from its newest "
            "weights at iteration 0; to continue the run, omit --finetune"
        )
    return None


def _newest(own: Source, *, lenient: bool) -> CheckpointContent:
    """Return the newest checkpoint of ``own``; if ``lenient`` the newest that can be read."""
    for folder in own["folders"][:-1] if lenient else ():
        with suppress(CheckpointError):
            return read_content(Path(folder))
    return read_content(Path(own["folders"][-1 if lenient else 0]))


def holds_adapters(folder: Path) -> bool:
    """Return whether a checkpoint holds adapters, and not the model that they belong to."""
    return base_named_in(read_content(folder).asked) is not None


def started_from(common: RunContent) -> str | None:
    """Return the folder of the weights that the run of a checkpoint started from."""
    named = common["args"].get(STARTED_FROM)
    return None if named is None else str(named)


def log_if_renamed(folder: Path, iteration: int) -> None:
    """Log that the name of the folder has another iteration than its contents."""
    name = folder.name.partition(".")[0]
    if name.startswith("iter_") and name != folder_name(iteration):
        print_rank_0(
            f"WARNING: {folder} was saved at iteration {iteration} and renamed since: iteration "
            f"{iteration} is used, not the one in the name"
        )


def choose_source(config: CheckpointConfig) -> Source | None:
    """Choose the checkpoint to load; None if the run starts from random weights.  Local.

    Raises CheckpointError, OSError.
    """
    source = _in_load(config)
    if source is not None:
        return source
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


def _in_load(config: CheckpointConfig) -> Source | None:
    """Return the checkpoint of --load, or a newer non-persistent one; None if there is none."""
    choice = find(config.load, config.ckpt_step, lenient=config.load_newest_valid)
    newer = newer_transient(config, choice)
    if newer is not None:
        kept = () if choice is None else (choice.found, *choice.older)
        note = f"loading the non-persistent checkpoint {newer.folder}, the newest one"
        choice = CheckpointChoice(newer, kept, note)
    if choice is None:
        return None
    assert config.load is not None
    return _source(config.load, choice, config.finetune, int(newer is not None))


def _source(
    root: str, choice: CheckpointChoice, is_finetuning: bool, num_transient: int = 0
) -> Source:
    return {
        "root": root,
        "folders": [str(found.folder) for found in (choice.found, *choice.older)],
        "num_transient": num_transient,
        "note": choice.note,
        "is_finetuning": is_finetuning or format_of(choice.found.folder) == HUGGING_FACE,
        "weights_only": is_finetuning or holds_weights_alone(choice.found.folder),
    }
