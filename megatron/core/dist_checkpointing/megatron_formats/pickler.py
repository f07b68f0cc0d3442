"""Writes the pickles of Megatron-LM's formats, without importing the classes they are made of."""

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
# Where a reader finds what has moved since.
_OLD_HOMES = {"numpy._core.multiarray": "numpy.core.multiarray"}


class Named:
    """An object of a class that is known by name only: ``state``, or what calling it gives.

    A plain dictionary as ``state`` is its attributes.
    """

    def __init__(self, *, state: object = None, args: tuple[object, ...] | None = None) -> None:
        self.state, self.args = state, args

    def __reduce__(self) -> tuple[object, ...]:
        if self.args is not None:
            return type(self), self.args
        return copyreg.__newobj__, (type(self),), self.state  # type: ignore[attr-defined]


def named(module: str, name: str) -> type[Named]:
    """The class ``name`` of ``module``, as far as a pickle says it."""
    return type(name, (Named,), {"__module__": module})


class _Pickler(pickle._Pickler):
    """Writes a name as it stands: the ordinary one imports it first."""

    dispatch: ClassVar[dict[type, Callable[..., None]]] = dict(pickle._Pickler.dispatch)

    def save_global(self: Any, obj: Any, name: str | None = None) -> None:
        module = "torch" if isinstance(obj, torch.dtype) else obj.__module__
        name = name or obj.__qualname__
        self.write(f"c{_OLD_HOMES.get(module, module)}\n{name}\n".encode("ascii"))
        self.memoize(obj)

    dispatch[type] = dispatch[FunctionType] = save_global


_MODULE = SimpleNamespace(Pickler=_Pickler, __name__="pickle")


def pickled(value: object) -> bytes:
    """``value`` as a pickle."""
    file = io.BytesIO()
    _Pickler(file, _PROTOCOL).dump(value)
    return file.getvalue()


def write_archive(target: Path | BinaryIO, value: object) -> None:
    """What torch.save writes of ``value``.  Raises OSError."""
    if isinstance(target, Path):
        with open(target, "wb") as file:  # torch's own files say less when a disk is full
            write_archive(file, value)
        return
    try:
        torch.save(value, target, pickle_module=_MODULE, pickle_protocol=_PROTOCOL)
    except RuntimeError as error:  # torch finds its file too short, after a write has failed
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """The values on the host, in a storage that holds nothing else."""
    tensor = tensor.detach().cpu().contiguous()
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return tensor if is_whole else tensor.clone()
