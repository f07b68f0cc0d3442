"""Types of checkpoint values other than tensors.

`Json` values are written by this project.  Values read from a file have type ``object`` until they
are checked; the mapping aliases below are for values that the reader converts entry by entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, TypedDict

# Entries of the state of a rank; the keys of Megatron-LM.
RNG_STATE = "rng_state"
RERUN_STATE = "rerun_state_machine"
# Entry of `Arguments` that Megatron-LM does not have: size of the vocabulary without padding.
TRUE_VOCAB_SIZE = "true_vocab_size"

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
JsonObject = dict[str, Any]  # parsed
Arguments = Mapping[str, Any]  # the command line of a run: dest -> value
Common = Mapping[str, Any]  # values equal on all ranks: `Contents.common`
Layout = Mapping[str, Any]  # degrees and rank order of the run that wrote a checkpoint
StateDict = dict[str, Any]  # with Megatron-LM's nesting
# Nested dicts and lists of any type; code that walks them checks the type of each entry.
Nested: TypeAlias = Any
# An object from another program's pickle.  Attributes are read within `manifest.parsing`, which
# raises CheckpointDamaged for a missing one.
Unpickled: TypeAlias = Any


class PlaceEntry(TypedDict):
    """A byte range of a file."""

    file: str
    start: int
    num_bytes: int


class PieceEntry(PlaceEntry):
    """A box of a tensor in a file, as an index entry."""

    offset: list[int]
    shape: list[int]
    crc32: NotRequired[list[int]]  # one per block
    sha256_128: NotRequired[str]  # with --ckpt-incremental


class TensorEntry(TypedDict):
    """A tensor, as an index entry; ``dtype`` is the format's name for it."""

    shape: list[int]
    dtype: str
    pieces: list[PieceEntry]
    cut: NotRequired[list[int] | None]  # in torch_dist: [sharded dimension, number of shards]
    num_stacked: NotRequired[int]  # in torch_dist: number of leading layer and expert dims
