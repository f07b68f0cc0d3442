"""Types of JSON values, command lines, and values read from files of other programs.

`Json` values are written by this project.  Values read from a file have type ``object`` until they
are checked; the mapping aliases are for values that the reader converts entry by entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
JsonObject = dict[str, Any]  # parsed
Shape = tuple[int, ...]  # sizes, or the position of an element: one number per dimension
Arguments = Mapping[str, Any]  # the command line of a run: dest -> value
StateDict = dict[str, Any]  # with Megatron-LM's nesting
# Nested dicts and lists of any type; code that walks them checks the type of each entry.
Nested: TypeAlias = Any
# An object from another program's pickle.  Attributes are read within
# `dist_checkpointing.manifest.parsing`, which raises CheckpointDamaged for a missing one.
Unpickled: TypeAlias = Any
