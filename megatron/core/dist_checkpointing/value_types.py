"""Types of the values in checkpoints that are no tensors.

`Json` is what this project writes.  The values of a file that is read are ``object`` until they
have been checked; mappings whose entries have a type each, which the reader converts, are the
aliases below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
JsonObject = dict[str, Any]  # parsed
Arguments = Mapping[str, Any]  # the command line of a run: dest -> value
Common = Mapping[str, Any]  # everything that all ranks share, by the names of `Contents.common`
Layout = Mapping[str, Any]  # degrees and rank order of the run that wrote a checkpoint
StateDict = dict[str, Any]  # nested as Megatron-LM nests it
# Dicts and lists of anything: code that walks them looks at the type of each entry.
Nested: TypeAlias = Any
# An object of another program's pickle.  Its attributes are taken within `manifest.parsing`, which
# reports those that it lacks.
Unpickled: TypeAlias = Any


class PlaceEntry(TypedDict):
    """Bytes of a file."""

    file: str
    start: int
    num_bytes: int


class PieceEntry(PlaceEntry):
    """A box of a tensor in a file, as an index has it."""

    offset: list[int]
    shape: list[int]
    crc32: NotRequired[list[int]]  # one per block
    sha256_128: NotRequired[str]  # with --ckpt-incremental


class TensorEntry(TypedDict):
    """A tensor as an index has it; ``dtype`` is the format's name of one."""

    shape: list[int]
    dtype: str
    pieces: list[PieceEntry]
    cut: NotRequired[list[int] | None]  # in torch_dist: the sharded dimension, and of how many
    num_stacked: NotRequired[int]  # in torch_dist: leading dimensions, of layers and experts
