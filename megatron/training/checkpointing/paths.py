"""Find the checkpoint of a directory, and read its contents besides tensors.

One process, no collectives.  Names of directories and of the tracker file are Megatron-LM's;
`megatron.core.dist_checkpointing.folders` documents the choice.
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments
from megatron.core.dist_checkpointing.folders import (
    TRACKER,
    CheckpointChoice,
    Found,
    choose,
    folder_name,
)
from megatron.core.dist_checkpointing.formats import format_of, open_reader
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest
from megatron.training.checkpointing.content_checks import RunContent, check_common


@dataclass(frozen=True)
class CheckpointContent:
    """Contents of a checkpoint besides tensors: enough to build the model that fits it.

    ``open_reader(folder)`` reads the tensors.
    """

    folder: Path
    iteration: int
    asked: Arguments  # the command line of the run that wrote it
    common: RunContent
    manifest: Manifest


def open_checkpoint(directory: str | Path, step: int | None = None) -> CheckpointContent:
    """Return the contents of the checkpoint of ``directory``, see `resolve_folder`.

    Raises CheckpointError if there is none, or it cannot be read.
    """
    return read_content(resolve_folder(directory, step))


def resolve_folder(directory: str | Path, step: int | None = None) -> Path:
    """Return the checkpoint folder that ``directory`` stands for.

    That is the folder of ``step`` or, without it, ``directory`` itself or the folder that its
    tracker selects.  Raises CheckpointError if there is none, or its manifest cannot be read.
    """
    choice = find(str(directory), step)
    if choice is None:
        raise CheckpointError(f"{directory} holds no checkpoint: no {TRACKER}, no iter_* folder")
    return usable(choice.found)


def usable(found: Found) -> Path:
    """Return the folder of ``found``; raise its error if its manifest cannot be read."""
    if found.problem is not None:
        raise found.problem
    return found.folder


def read_content(folder: Path) -> CheckpointContent:
    """Read the contents of a folder besides tensors.  Raises CheckpointError."""
    with open_reader(folder) as reader:
        common = check_common(reader.common(), folder)
        return CheckpointContent(
            folder, reader.manifest.iteration, common["args"], common, reader.manifest
        )


def find(
    directory: str | None, step: int | None, *, lenient: bool = False
) -> CheckpointChoice | None:
    """Return the checkpoint that ``--load directory --ckpt-step step`` selects, None if none.

    ``directory`` may also be the folder of one checkpoint.  ``lenient``: see `folders.choose`.
    Raises CheckpointError, also for a model folder of Hugging Face, and OSError.
    """
    if directory is None:
        return None
    path = Path(directory)
    if path.is_file():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    if step is None and format_of(path) is not None:
        manifest = read_manifest(path)
        return CheckpointChoice(Found(path, manifest.iteration if manifest else None, manifest))
    choice = choose(path, step=step, lenient=lenient)
    if choice is None and (path / "config.json").is_file():
        converted = f"{path.name or 'model'}-converted"
        raise CheckpointError(
            f"{directory} is a Hugging Face model folder (it has config.json), not a checkpoint: "
            f"convert it with `python tools/checkpoint/convert.py --from {directory} "
            f"--to {converted}`, and give --load {converted} --use-checkpoint-args "
            f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {directory}"
        )
    return choice


def is_same_directory(a: str | None, b: str | None) -> bool:
    """Return whether two options name the same directory, however they are spelt."""
    return a is not None and b is not None and Path(a).resolve() == Path(b).resolve()


def check_writable(directory: str) -> None:
    """Create ``directory`` and a temporary file in it.  Raises CheckpointError if that fails.

    Called at start-up, because the first save may be hours later.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
            pass
    except OSError as error:
        raise CheckpointError(f"--save {directory} cannot be written to: {error}") from None


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """Return the path of the file that names the last saved iteration."""
    return str(Path(checkpoints_path) / TRACKER)


def checkpoint_folder(checkpoints_path: str, iteration: int, release: bool = False) -> str:
    """Return the path of the folder of an iteration, or of the release."""
    return str(Path(checkpoints_path) / folder_name(None if release else iteration))
