"""Convert Python values to JSON and back, without pickle.

A type that JSON does not have becomes an object with one key that begins with ``$``.  `encode`
collects tensors by path for the caller to save; `decode` gets a function that reads one.  Random
states have Megatron-LM's names and forms; their byte tensors become base64.
"""

from __future__ import annotations

import base64
import enum
import math
from argparse import Namespace
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from megatron.core import enums
from megatron.core.config.errors import CheckpointError
from megatron.core.config.value_types import Json, JsonObject, Nested, StateDict, Unpickled
from megatron.core.dist_checkpointing.safetensors_file import bytes_of, dtype_name


def encode(value: object, path: str, tensors: dict[str, Tensor] | None = None) -> Json:
    """Return ``value`` as JSON; put its tensors into ``tensors`` under their paths.

    Without ``tensors`` they become base64, as arrays do.

    Raises CheckpointError, with its ``path``, for a value of an unsupported type.
    """
    if value is None or isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor) and tensors is not None:
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, enum.Enum) and vars(enums).get(type(value).__name__) is type(value):
        return {"$enum": [type(value).__name__, value.name]}
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        content = base64.b64encode(bytes_of(value)).decode("ascii")
        return {"$values": [dtype_name(value.dtype), list(value.shape), content]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        content = base64.b64encode(value.tobytes()).decode("ascii")
        return {"$array": [value.dtype.str, list(value.shape), content]}
    if isinstance(value, np.generic):
        return encode(value.item(), path)
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, list):
        return [encode(entry, f"{path}.{i}", tensors) for i, entry in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": encode(list(value), path, tensors)}
    if isinstance(value, Namespace):
        return {"$namespace": encode(vars(value), path, tensors)}
    if isinstance(value, dict):
        entries = {key: encode(entry, f"{path}.{key}", tensors) for key, entry in value.items()}
        named = {key: e for key, e in entries.items() if isinstance(key, str) and key[:1] != "$"}
        if len(named) == len(entries):
            return named
        return {"$items": [[encode(key, path), entry] for key, entry in entries.items()]}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which is not saved: no pickle is written; give "
        "numbers, text, lists, dicts or tensors, or leave it out"
    )


def decode(value: Json, read: Callable[[str], Tensor]) -> Nested:
    """Return the value that `encode` received; ``read`` returns the tensor of a key."""
    if isinstance(value, list):
        return [decode(entry, read) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind in _DECODERS:
            return _DECODERS[kind](content, read)
    return {key: decode(entry, read) for key, entry in value.items()}


_DECODERS: dict[str, Callable[[Nested, Callable[[str], Tensor]], object]] = {
    "$float": lambda content, read: float(content),
    "$tensor": lambda content, read: read(f"common.{content}"),
    "$dtype": lambda content, read: _DTYPES[content],
    "$enum": lambda content, read: getattr(enums, content[0])[content[1]],
    "$values": lambda content, read: (
        _byte_tensor(content[2]).view(_DTYPES[content[0]]).view(content[1])
    ),
    "$array": lambda content, read: (
        np.frombuffer(base64.b64decode(content[2]), content[0]).reshape(content[1]).copy()
    ),
    "$bytes": lambda content, read: base64.b64decode(content),
    "$tuple": lambda content, read: tuple(decode(content, read)),
    "$namespace": lambda content, read: Namespace(**decode(content, read)),
    "$items": lambda content, read: {decode(k, read): decode(v, read) for k, v in content},
}
_DTYPES: dict[str, torch.dtype] = {
    dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}


def to_json(states: StateDict) -> JsonObject:
    """Return random states as JSON."""
    version, words, gauss = states["random_rng_state"]
    kind, keys, *rest = states["np_rng_state"]
    return {
        "random_rng_state": [version, list(words), gauss],
        "np_rng_state": [kind, np.asarray(keys).tolist(), *rest],
        **_tensors(states, lambda state: base64.b64encode(bytes_of(state)).decode()),
    }


def from_json(values: JsonObject) -> StateDict:
    """Return the states that `to_json` converted."""
    version, words, gauss = values["random_rng_state"]
    kind, keys, *rest = values["np_rng_state"]
    return {
        "random_rng_state": (version, tuple(words), gauss),
        "np_rng_state": (kind, np.array(keys, dtype=np.uint32), *rest),
        **_tensors(values, _byte_tensor),
    }


def _byte_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _tensors(states: StateDict, convert: Callable[[Unpickled], str | Tensor]) -> StateDict:
    on_device, streams = states["cuda_rng_state"], states["rng_tracker_states"]
    return {
        "torch_rng_state": convert(states["torch_rng_state"]),
        "cuda_rng_state": None if on_device is None else convert(on_device),
        "rng_tracker_states": {name: convert(state) for name, state in streams.items()},
    }


def plain(value: object, convert: Callable[[object], object] = str) -> Nested:
    """Return ``value`` as JSON; an enum becomes its name.

    ``convert`` replaces a value of another type; what it returns is converted in turn.
    """
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, convert) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, convert) for item in value]
    return plain(convert(value), convert)
