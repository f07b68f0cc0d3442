"""Find the checkpoint of a directory; read and check its contents besides tensors.

A checksum proves that a file is unchanged, not that a training run wrote it.

One process, no collectives.  Names of directories and of the tracker file are Megatron-LM's;
`megatron.core.dist_checkpointing.folders` documents the choice.
"""

from __future__ import annotations

import errno
import os
import pkgutil
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, TypeGuard, cast

import numpy as np
import torch
from typing_extensions import NotRequired  # of typing from Python 3.11 on; torch needs the package

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Arguments, JsonObject
from megatron.core.dist_checkpointing import plain_values
from megatron.core.dist_checkpointing.folders import (
    RELEASE,
    TRACKER,
    CheckpointChoice,
    CheckpointFolder,
    choose,
    folder_name,
)
from megatron.core.dist_checkpointing.formats import HUGGING_FACE, READERS, format_of, open_reader
from megatron.core.dist_checkpointing.manifest import (
    RERUN_STATE,
    RNG_STATE,
    Common,
    Manifest,
    is_count,
    parsing,
    read_manifest,
)
from megatron.core.dist_checkpointing.reader import CheckpointReader
from megatron.core.rerun.results import RerunMode
from megatron.core.rerun.state_machine import RerunStateMachine


def _open_model_folder(folder: Path) -> CheckpointReader:
    """Open a Hugging Face folder; the package that knows the families is imported here."""
    opened: CheckpointReader = pkgutil.resolve_name(_MODEL_FOLDER)(folder)
    return opened


_MODEL_FOLDER = "megatron.training.conversion.model_folder:HuggingFaceReader"
READERS.register(HUGGING_FACE, _open_model_folder)


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


def usable(found: CheckpointFolder) -> Path:
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
    Or a Hugging Face model folder, if it holds no checkpoint.  Raises CheckpointError, OSError.
    """
    if directory is None:
        return None
    path = Path(directory)
    if path.is_file():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    found = None if step is not None else format_of(path)
    if found not in (None, HUGGING_FACE):
        manifest = read_manifest(path)
        return CheckpointChoice(
            CheckpointFolder(path, manifest.iteration if manifest else None, manifest)
        )
    choice = choose(path, step=step, lenient=lenient)
    if choice is None and found == HUGGING_FACE:
        return CheckpointChoice(CheckpointFolder(path, None))
    if choice is None and any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{directory} has safetensors files and no config.json, so it is neither a checkpoint "
            "nor a Hugging Face model: name the folder that save_pretrained() or a download made"
        )
    return choice


def holds_weights_alone(folder: Path) -> bool:
    """Return whether a checkpoint holds a model and no run: a release or a Hugging Face folder."""
    return folder.name == RELEASE or format_of(folder) == HUGGING_FACE


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


_TOO_LARGE = 1e300  # much larger integers cannot become a float
_NP_WORDS = 624  # of the Mersenne twister


class RunContent(TypedDict):
    """Values that a run saves besides tensors, equal on all ranks: its `Contents.common`."""

    checkpoint_version: float
    iteration: int
    counters: Mapping[str, float]
    args: Arguments
    optimizer: JsonObject | None
    opt_param_scheduler: Mapping[str, float | str] | None
    stages: NotRequired[list[list[int]]]
    objective_state: NotRequired[JsonObject | None]
    torch_version: NotRequired[str]
    python_version: NotRequired[str]


def check_common(common: Common, folder: Path) -> RunContent:
    """Return ``common`` of the checkpoint in ``folder`` if a run can resume from it.

    Raises CheckpointDamaged for a value that no run writes, CheckpointError for a checkpoint that
    was saved by the library function `dist_checkpointing.save`.
    """
    if not holds_run(common):
        raise CheckpointError(
            f"{folder} is a library checkpoint, saved by megatron.core.dist_checkpointing.save: it "
            "holds no arguments and no iteration of a training run; read it with "
            "megatron.core.dist_checkpointing.load"
        )
    optimizer, schedule = common.get("optimizer"), common.get("opt_param_scheduler")
    objective_state = common.get("objective_state")
    of_optimizer = optimizer if isinstance(optimizer, dict) else {"step": 0}
    scaler = of_optimizer.get("grad_scaler")
    counters = common.get("counters")
    problems = {
        "iteration": is_count(common.get("iteration")),
        "args": isinstance(common.get("args"), dict),
        "checkpoint_version": _is_number(common.get("checkpoint_version")),
        "counters": isinstance(counters, dict)
        and all(
            _is_number(abs(number) if name == "best_metric" and type(number) is float else number)
            for name, number in counters.items()
        ),
        "optimizer": optimizer is None or isinstance(optimizer, dict),
        "optimizer.step": _is_number(of_optimizer.get("step")),
        # The counters of a loss scaler are negative while steps are skipped, its scale never is.
        "optimizer.grad_scaler": scaler is None
        or isinstance(scaler, dict)
        and all(
            _is_number(abs(number) if type(number) is int and name != "scale" else number)
            for name, number in scaler.items()
        ),
        "objective_state": objective_state is None or isinstance(objective_state, dict),
        "opt_param_scheduler": schedule is None
        or isinstance(schedule, dict)
        and all(isinstance(item, str | int | float | None) for item in schedule.values()),
    }
    for name, is_right in problems.items():
        if not is_right:
            raise CheckpointDamaged(f"{folder} is damaged: its {name} cannot be of a run")
    return cast(RunContent, {"optimizer": None, "opt_param_scheduler": None, **common})


def holds_run(common: Common) -> bool:
    """Return whether a training run saved ``common``; `dist_checkpointing.save` has other keys."""
    return not common.keys().isdisjoint(("args", "checkpoint_version", "counters", "iteration"))


def check_rank_state(state: JsonObject, where: Path) -> JsonObject:
    """Return the state of a rank if its parts can be restored.

    Raises CheckpointDamaged if a random generator or the rerun state machine does not accept its
    state.
    """
    with parsing(where):
        if RNG_STATE in state:
            _check_rng_state(state[RNG_STATE])
        if RERUN_STATE in state:
            machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
            machine.load_saved_state(state[RERUN_STATE])
    return state


def _check_rng_state(states: JsonObject) -> None:
    found = plain_values.from_json(states)
    random.Random().setstate(found["random_rng_state"])
    np.random.RandomState().set_state(found["np_rng_state"])
    position = found["np_rng_state"][2]
    if not is_count(position) or position > _NP_WORDS:  # numpy does not check this index
        raise ValueError(f"position {position!r} in numpy's state")
    torch.Generator().set_state(found["torch_rng_state"])


def _is_number(value: object) -> TypeGuard[float]:
    is_bool = isinstance(value, bool)  # which is an int
    return isinstance(value, int | float) and not is_bool and 0 <= value < _TOO_LARGE
