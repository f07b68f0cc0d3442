"""Which checkpoint a directory means, and what a folder holds.  One process, no collectives.

Directory names and the tracker file are the reference's; `megatron.core.dist_checkpointing.folders`
says how the folder is chosen.
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.dist_checkpointing.folders import (
    TRACKER,
    CheckpointChoice,
    Found,
    choose,
    folder_name,
)
from megatron.core.dist_checkpointing.formats import format_of, open_reader
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest
from megatron.core.dist_checkpointing.value_types import Arguments
from megatron.training.checkpointing.content_checks import RunContent, check_common


@dataclass(frozen=True)
class CheckpointContent:
    """A checkpoint folder but for its tensors: enough to build the model that fits it.

    The tensors are read with ``open_reader(folder)``.
    """

    folder: Path
    iteration: int
    asked: Arguments  # the command line of the run that wrote it
    common: RunContent
    manifest: Manifest


def open_checkpoint(directory: str | Path, step: int | None = None) -> CheckpointContent:
    """The checkpoint of a run that ``directory`` means, see `resolve_folder`.

    Raises CheckpointError if there is none, or it cannot be read.
    """
    return read_content(resolve_folder(directory, step))


def resolve_folder(directory: str | Path, step: int | None = None) -> Path:
    """The folder that ``directory`` means: itself, or the one its tracker names.

    Raises CheckpointError if there is none, or its manifest cannot be read.
    """
    choice = find(str(directory), step)
    if choice is None:
        raise CheckpointError(f"{directory} holds no checkpoint: no {TRACKER}, no iter_* folder")
    return usable(choice.found)


def usable(found: Found) -> Path:
    """The folder of ``found`` if its manifest can be read; else raises why not."""
    if found.problem is not None:
        raise found.problem
    return found.folder


def read_content(folder: Path) -> CheckpointContent:
    """What a folder holds beside tensors.  Raises CheckpointError, CheckpointDamaged."""
    with open_reader(folder) as reader:
        common = check_common(reader.common(), folder)
        return CheckpointContent(
            folder, reader.manifest.iteration, common["args"], common, reader.manifest
        )


def find(
    directory: str | None, step: int | None, *, lenient: bool = False
) -> CheckpointChoice | None:
    """What ``--load directory --ckpt-step step`` means; None if there is no checkpoint.

    ``directory`` may also be the folder of one checkpoint.  ``lenient``: see `folders.choose`.
    Raises CheckpointError, OSError.
    """
    if directory is None:
        return None
    path = Path(directory)
    if path.is_file():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    if step is None and format_of(path) is not None:
        manifest = read_manifest(path)
        return CheckpointChoice(Found(path, manifest.iteration if manifest else None, manifest))
    return choose(path, step=step, lenient=lenient)


def is_same_directory(a: str | None, b: str | None) -> bool:
    """Whether two options name one directory, however they are spelt."""
    return a is not None and b is not None and Path(a).resolve() == Path(b).resolve()


def check_writable(directory: str) -> None:
    """Make ``directory`` and a file in it.  Raises CheckpointError where that fails.

    At start-up: the first save may be hours away.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-"):
            pass
    except OSError as error:
        raise CheckpointError(f"--save {directory} cannot be written to: {error}") from None


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """The file that says which iteration was saved last."""
    return str(Path(checkpoints_path) / TRACKER)


def checkpoint_folder(checkpoints_path: str, iteration: int, release: bool = False) -> str:
    """The folder of an iteration."""
    return str(Path(checkpoints_path) / folder_name(None if release else iteration))
