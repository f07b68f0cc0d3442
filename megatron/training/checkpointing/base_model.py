"""Checkpoints of adapters, or of draft heads: they name their frozen model and do not hold it.

The base is named by its folder and by a hash of its weights, which is the same in every layout.
Both are stored beside the command line, as ``lora_base_folder`` and ``lora_base_hash``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Arguments
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.dist_checkpointing.hashing import hash_of_all
from megatron.core.dist_checkpointing.records import TensorRecord, to_write
from megatron.core.params.param_info import info_of
from megatron.core.peft.lora import is_of_adapter
from megatron.training.checkpointing.checkpoint_tensors import RunParts, model_tensors
from megatron.training.checkpointing.paths import resolve_folder

HEADS = ("draft.", "mtp.")  # prefixes of draft heads, if they are trained alone
_FOLDER = "lora_base_folder"
_HASH = "lora_base_hash"
_FLAG = "--pretrained-checkpoint"


@dataclass(frozen=True)
class BaseModel:
    """The frozen model of adapters; ``folder`` is None for random weights."""

    folder: str | None
    hash: str

    @property
    def arguments(self) -> dict[str, str | None]:
        """Entries of a checkpoint's command line that name the base."""
        return {_FOLDER: self.folder, _HASH: self.hash}


def base_named_in(arguments: Arguments) -> BaseModel | None:
    """Return the base that a checkpoint of adapters names; None for a complete checkpoint."""
    if arguments.get(_HASH) is None:
        return None
    folder = arguments.get(_FOLDER)
    return BaseModel(None if folder is None else str(folder), str(arguments[_HASH]))


def has_adapters(parts: RunParts) -> bool:
    """Return whether this stage has adapters, or draft heads that are trained alone."""
    infos = (info_of(param) for chunk in parts.model_chunks for param in chunk.parameters())
    return any(
        is_of_adapter(info.name) or (info.is_new and info.name.startswith(HEADS)) for info in infos
    )


def of_base(tensors: Iterable[TensorRecord]) -> list[TensorRecord]:
    """Return the tensors that a checkpoint of the base holds: frozen weights, and buffers."""
    return [
        tensor
        for tensor in tensors
        if tensor.is_constant or (tensor.is_buffer and not tensor.key.startswith(HEADS))
    ]


def of_adapters(tensors: Iterable[TensorRecord]) -> list[TensorRecord]:
    """Return the tensors that a checkpoint of adapters holds: all but frozen weights."""
    return [tensor for tensor in tensors if not tensor.is_constant]


def identify(parts: RunParts, folder: str | None) -> BaseModel:
    """Return the name of the frozen model that was loaded from ``folder``.

    Collective over all ranks.
    """
    frozen = [tensor for tensor in model_tensors(parts) if tensor.is_constant]
    number = hash_of_all(to_write(frozen, share_work=False), parts.groups.world)
    return BaseModel(folder, f"{number:016x}")


def folder_of_base(
    named: BaseModel, given: str | None, adapters: Path, flag: str = _FLAG
) -> str | None:
    """Return the folder of the base: ``given`` by ``flag``, or where it was.

    None if the base was random.  Raises CheckpointError if there is none.
    """
    if given is not None:
        return str(resolve_folder(given).resolve())
    if named.folder is not None and format_of(Path(named.folder)) is None:
        raise CheckpointError(
            f"{adapters} holds adapters alone; their base {named.folder} is not there: give its "
            f"directory with {flag}; a program without this flag needs one model, which "
            "tools/checkpoint/convert.py writes with --base"
        )
    return named.folder


def check_base(named: BaseModel, found: BaseModel, adapters: Path, flag: str = _FLAG) -> None:
    """Raise CheckpointError unless the loaded base is the one that the adapters name."""
    if named.hash != found.hash:
        raise CheckpointError(
            f"{adapters} holds adapters of another base: of {named.folder or 'random weights'} "
            f"with hash {named.hash}, but {found.folder or 'these random weights'} has "
            f"{found.hash}; give their base with {flag}"
        )
