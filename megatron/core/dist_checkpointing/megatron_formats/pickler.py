"""Write the pickles of Megatron-LM's formats, without importing the classes in them."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

_PROTOCOL = 2  # as torch.save
# Modules that were renamed -> their old names, which every reader can import.
_OLD_HOMES = {"numpy._core.multiarray": "numpy.core.multiarray"}


class Named:
    """An object of a class known only by name: its ``state``, or the ``args`` of its constructor.

    A plain dictionary as ``state`` becomes its attributes.
    """

    def __init__(self, *, state: object = None, args: tuple[object, ...] | None = None) -> None:
        self.state, self.args = state, args

    def __reduce__(self) -> tuple[object, ...]:
        if self.args is not None:
            return type(self), self.args
        return copyreg.__newobj__, (type(self),), self.state  # type: ignore[attr-defined]


def named(module: str, name: str) -> type[Named]:
    """Return a placeholder for class ``name`` of ``module``, which a pickle refers to by name."""
    return type(name, (Named,), {"__module__": module})


class _Pickler(pickle._Pickler):
    """Pickler that writes class names without importing them, unlike the standard pickler."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)

    def save_global(self: Any, obj: Any, name: str | None = None) -> None:
        module = "torch" if isinstance(obj, torch.dtype) else obj.__module__
        name = name or obj.__qualname__
        self.write(f"c{_OLD_HOMES.get(module, module)}\n{name}\n".encode("ascii"))
        self.memoize(obj)

    dispatch[type] = dispatch[FunctionType] = save_global


_MODULE = SimpleNamespace(Pickler=_Pickler, __name__="pickle")


def pickled(value: object) -> bytes:
    """Return the pickle of ``value``."""
    file = io.BytesIO()
    _Pickler(file, _PROTOCOL).dump(value)
    return file.getvalue()


def write_archive(target: Path | BinaryIO, value: object) -> None:
    """Write ``value`` as torch.save does.  Raises OSError."""
    if isinstance(target, Path):
        with open(target, "wb") as file:  # torch's own file writer hides the OSError of a full disk
            write_archive(file, value)
        return
    try:
        torch.save(value, target, pickle_module=_MODULE, pickle_protocol=_PROTOCOL)
    except RuntimeError as error:  # after a failed write torch reports a short file
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values on the CPU, in a storage without other data."""
    tensor = tensor.detach().cpu().contiguous()
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return tensor if is_whole else tensor.clone()
