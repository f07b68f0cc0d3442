"""Call fused C++ kernels for CPU tensors, if the extension is installed.

The only caller of ``kernels_cpp`` (fusions/cpu/kernels.cpp), whose arguments are addresses.
Results do not depend on the number of threads; with one thread a kernel starts no other.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron.core import device
from megatron.core.optional import why_missing

Arguments: TypeAlias = tuple[Any, ...]  # of the extension's `run`
Recorder: TypeAlias = Callable[[Arguments, Sequence[Tensor | None]], None]

_CPP = "megatron.core.kernels_cpp"
_FORMATS = {torch.float32: " float32", torch.bfloat16: " bfloat16"}
_NAMES = {**_FORMATS, torch.int8: " int8"}
_TYPES = (Tensor, nn.Parameter, FakeTensor)
_NUMBERS = 2**14  # elements per task of a thread: fits the cache, amortises the scheduling
_of_thread = threading.local()  # its ``recorder``, while a pass is recorded


@cache
def compiled() -> ModuleType | None:
    """Return the extension module, or None if it is not installed."""
    return importlib.import_module(_CPP) if why_missing(_CPP) is None else None


def unsupported_reason(dtype: torch.dtype) -> str | None:
    """Return why no kernel supports CPU tensors of ``dtype``, or None if one does."""
    if compiled() is None:
        return f"{why_missing(_CPP)}: python setup.py build_ext --inplace"
    return None if dtype in _FORMATS else f"there are none for {dtype}"


def take(*tensors: Tensor | None) -> bool:
    """Return whether kernels support these tensors: on the CPU, all of one supported dtype.

    Ignores None.  The caller must check that the tensors are contiguous.  True also for meta and
    fake tensors, for which `run` does nothing.
    """
    if compiled() is None or torch.compiler.is_compiling():
        return False  # torch.compile fuses the reference implementation
    dtype = None
    for t in tensors:  # no comprehensions: a step of generation calls this function 100 times
        if t is None:
            continue
        dtype = dtype or t.dtype
        if t.dtype is not dtype or type(t) not in _TYPES or not (t.is_cpu or t.is_meta):
            return False
        if device.is_cuda(t.device):
            return False
    return dtype in _FORMATS


@cache
def has(name: str, format: torch.dtype) -> bool:
    """Return whether the installed extension has the kernel; an older one may not."""
    kernels = compiled()
    return kernels is not None and name + _NAMES.get(format, "") in kernels.names()


def run(
    name: str,
    tensors: Sequence[Tensor | None],
    *,
    format: torch.dtype,
    count: int,
    sizes: Sequence[int] = (),
    numbers: Sequence[float] = (),
    width: int = 1,
    grain: int | None = None,
) -> None:
    """Run a kernel over ``count`` units of ``width`` elements each, ``grain`` units per task.

    Does nothing if a tensor is meta or fake (memory planning).
    """
    addresses = []
    for t in tensors:
        if t is None:
            addresses.append(0)
        elif t.is_meta or isinstance(t, FakeTensor):
            return
        else:
            addresses.append(t.data_ptr())
    kernels = compiled()
    assert kernels is not None, "kernels are run where `take` says so"
    grain = grain or max(1, _NUMBERS // width)
    threads = torch.get_num_threads()
    call = (name + _NAMES[format], addresses, sizes, numbers, count, grain, threads)
    kernels.run(*call)
    if (recorder := getattr(_of_thread, "recorder", None)) is not None:
        recorder(call, tensors)


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` arguments and tensors of every kernel that this thread runs inside."""
    assert not is_recording(), "recordings do not nest"
    _of_thread.recorder = recorder
    try:
        yield
    finally:
        _of_thread.recorder = None


def is_recording() -> bool:
    """Return whether this thread records kernels: then the host must not look at numbers."""
    return getattr(_of_thread, "recorder", None) is not None


def can_record() -> bool:
    """Return whether the installed extension records kernels; an older one does not."""
    return hasattr(compiled(), "Tape")


def new_tape() -> Any:
    """Return an empty list of calls: ``add(*arguments)`` and ``replay()``."""
    kernels = compiled()
    assert kernels is not None, "see `can_record`"
    return kernels.Tape()
