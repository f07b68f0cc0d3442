"""Read pickles without running code from them; no other module unpickles.

Known class names become plain records, others are refused.  No module is imported and no function
that a file names is called.  Classes of Megatron and of torch's distributed checkpoints become
`Record`, which has the pickled values; tensors become the result of ``rebuild`` for their storage,
offset, shape and stride.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch

from megatron.core.config.errors import CheckpointDamaged, CheckpointError
from megatron.core.config.value_types import Shape, Unpickled
from megatron.core.dist_checkpointing.manifest import MALFORMED

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# Modules whose classes become records; a pattern for their names.
_RECORDS = {
    r"argparse": r"Namespace",
    r"types": r"SimpleNamespace",
    r"pathlib(\._local)?": r"(Pure)?(Posix|Windows)?Path",
    r"signal": r"Signals",
    r"megatron(\.\w+)*\.enums": r"\w+",
    r"megatron\.core\.rerun_state_machine": r"\w+",
    r"megatron\.core\.dist_checkpointing\.(mapping|strategies\.torch)": r"\w+",
    r"megatron\.core\.optimizer\.(optimizer|distrib_optimizer)": r"\w+",
    r"torch\.distributed\.checkpoint\.(filesystem|metadata|planner)": r"\w+",
    r"torch\.distributed\._shard\.sharded_tensor\.metadata": r"\w+",
}
_FAILURES = (*MALFORMED, pickle.UnpicklingError, EOFError, ImportError, struct.error)

Storage = tuple[torch.dtype, str, int]  # dtype, key in the archive, elements
_Sizes = Iterable[int]
Rebuild = Callable[[Storage, int, Shape, Shape], object]


class Record:
    """An object whose class is not imported: its pickled arguments and attributes."""

    __slots__ = ("pickled_args", "pickled_state")
    pickled_args: tuple[Unpickled, ...]
    pickled_state: Unpickled

    def __new__(cls, *args: object) -> Record:
        record = super().__new__(cls)
        record.pickled_args, record.pickled_state = args, None
        return record

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.pickled_state = state

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.pickled_args))})"


def unpickle(data: bytes, path: object, rebuild: Rebuild | None = None) -> Unpickled:
    """Return the object in ``data``.

    ``path`` is for messages; ``rebuild`` returns the value for a tensor.  Raises CheckpointError
    for an unknown class name, CheckpointDamaged for data that is not a pickle.
    """
    try:
        return _Unpickler(data, path, rebuild).load()
    except CheckpointError:
        raise
    except _FAILURES as error:
        raise CheckpointDamaged(f"{path} is damaged: it cannot be unpickled ({error})") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: object, rebuild: Rebuild | None) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._known = _plain() | (_functions(rebuild) if rebuild else {})

    def find_class(self, module: str, name: str) -> object:
        key = (module.replace("numpy._core", "numpy.core"), name)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, module: str, name: str) -> object:
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        for modules, names in _RECORDS.items():
            if re.fullmatch(modules, module) and re.fullmatch(names, name):
                return type(name, (Record,), {})
        raise CheckpointError(
            f"{self._path} holds an object of {module}.{name}, which is not unpickled: no "
            "checkpoint of Megatron-LM has one; if you trust the file, save it without that object"
        )

    def persistent_load(self, pid: Unpickled) -> Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"unknown reference {kind!r}")
        return dtype, str(key), int(numel)


def _functions(rebuild: Rebuild) -> dict[tuple[str, str], object]:
    """Return replacements for the functions that torch's pickles call to make tensors."""

    def tensor_v3(
        storage: Storage, offset: int, shape: _Sizes, stride: _Sizes, *others: Unpickled
    ) -> object:
        _grad, _hooks, dtype = others
        typed = (dtype, storage[1], storage[2] // dtype.itemsize)
        return rebuild(typed, offset, tuple(shape), tuple(stride))

    return {
        ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, stride, *_: rebuild(
            storage, offset, tuple(shape), tuple(stride)
        ),
        ("torch._utils", "_rebuild_tensor_v3"): tensor_v3,
        ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    }


def _encode(text: str, codec: str) -> bytes:
    if codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"unknown codec {codec!r}")
    return text.encode("latin1")


def _dtype(code: str, *_: object) -> np.dtype:
    if not re.fullmatch(r"[<>=|]?[biufc?]\d*", code):
        raise pickle.UnpicklingError(f"array of {code!r}")
    return np.dtype(code)


def _plain() -> dict[tuple[str, str], object]:
    """Return replacements for common functions and classes in pickles.

    Functions are wrapped anew for each pickle, because a pickle can modify a function it names.
    """
    return {
        ("collections", "OrderedDict"): OrderedDict,
        ("collections", "defaultdict"): lambda *_: {},
        ("builtins", "set"): set,
        ("builtins", "frozenset"): frozenset,
        ("builtins", "slice"): slice,
        ("builtins", "complex"): complex,
        ("_codecs", "encode"): partial(_encode),
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): partial(_dtype),
        ("numpy.core.multiarray", "_reconstruct"): (lambda *_: np.empty(0, dtype=np.uint8)),
        ("numpy.core.multiarray", "scalar"): (
            lambda dtype, data: np.frombuffer(data, dtype=dtype)[0].item()
        ),
        ("torch", "Size"): lambda sizes=(): tuple(sizes),
        ("torch", "device"): lambda *args: ":".join(map(str, args)),
        ("torch.serialization", "_get_layout"): partial(str),
        ("torch.storage", "UntypedStorage"): torch.uint8,
    }
