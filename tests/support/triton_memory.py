"""Check in Triton's interpreter that kernels read and write only memory of tensors."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ASKED = "TESTS_ADDRESSES"  # variable: check the addresses in interpreted kernels
_WITH_TABLES = ("megatron.core.fusions.triton.adam",)  # kernels that read addresses from tensors

Addresses = npt.NDArray[np.uint64]


class _Memory:
    """Begin and end of the memory that the running kernel may access."""

    def __init__(self) -> None:
        self._begins: Addresses = np.zeros(0, np.uint64)
        self._ends = self._begins
        self._kernel = ""

    def open(self, kernel: Any, arguments: list[object]) -> None:
        """Let ``kernel`` access the storages of its arguments, or of all tensors."""
        has_table = kernel.__module__ in _WITH_TABLES
        tensors = _tensors_in(gc.get_objects() if has_table else arguments)
        storages = [x.untyped_storage() for x in tensors if x.device.type == "cpu"]
        parts = sorted({(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()})
        self._begins = np.array([begin for begin, _ in parts], np.uint64)
        self._ends = np.array([end for _, end in parts], np.uint64)
        self._kernel = kernel.__name__

    def check(self, pointers: Any, mask: Any) -> None:
        """Raise AssertionError if a pointer, where ``mask`` holds, is outside."""
        addresses = np.asarray(pointers.data).astype(np.uint64)
        addresses = addresses[np.broadcast_to(np.asarray(mask.data).astype(bool), addresses.shape)]
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        if addresses.size:
            i = np.searchsorted(self._begins, addresses, side="right") - 1
            is_inside = (i >= 0) & (addresses + size <= self._ends[np.maximum(i, 0)])
            count = int((~is_inside).sum())
            assert not count, f"{self._kernel}: {count} addresses are outside of its tensors"


def check_addresses() -> None:
    """Check each load, store and atomic operation of the kernels that are launched from now on."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    memory = _Memory()
    executor = interpreter.GridExecutor
    builder = interpreter.InterpreterBuilder
    on_host = executor._init_args_hst
    load = builder.create_masked_load
    store = builder.create_masked_store
    update = builder.create_atomic_rmw

    def open_memory(self: Any, args: Any, kwargs: Any) -> Any:
        found = on_host(self, args, kwargs)
        memory.open(self.fn, [*found[0], *found[1].values()])
        return found

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
        memory.check(pointers, mask)
        return store(self, pointers, values, mask, *rest)

    def checked_update(
        self: Any, kind: Any, pointers: Any, values: Any, mask: Any, *rest: Any
    ) -> Any:
        memory.check(pointers, mask)
        return update(self, kind, pointers, values, mask, *rest)

    executor._init_args_hst = open_memory
    builder.create_masked_load = checked_load
    builder.create_masked_store = checked_store
    builder.create_atomic_rmw = checked_update


def _tensors_in(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, tuple):
            yield from _tensors_in(list(value))
        elif isinstance(value, torch.Tensor):
            yield value
