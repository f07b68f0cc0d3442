"""Passes on a CPU that are recorded once and replayed without Python.

A step of generation is some hundred kernels, and the weights that it reads displace Python's data
from the caches: the host needs 10 to 20 us per call.  A `HostGraph` keeps the calls with their
addresses, as a CUDA graph does; a replay reads and writes the same memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.core.device import cpu_kernels

Bytes: TypeAlias = npt.NDArray[np.uint8]

_ALIGNMENT = 64  # bytes
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
_READS_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Arena:
    """Memory of the tensors that recorded passes make; all graphs of a model share it.

    A block, of a power of two of bytes, is free again when the last tensor on it is deleted.  So
    graphs overwrite each other's tensors: a result is valid until the next replay of any of them.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Bytes] = {}  # by address
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # size -> addresses

    def empty(self, like: Tensor) -> Tensor:
        """Return a tensor with shape, strides and dtype of ``like`` on a block of its own."""
        num_bytes = max(like.untyped_storage().nbytes(), _ALIGNMENT)
        size = 1 << (num_bytes - 1).bit_length()
        free = self._free[size]
        if not free:
            memory = np.empty(size + _ALIGNMENT, np.uint8)
            memory = memory[-memory.ctypes.data % _ALIGNMENT :][:size]
            self.blocks[memory.ctypes.data] = memory
            free.append(memory.ctypes.data)
        address = free.pop()
        block = self.blocks[address][:]  # the tensor keeps this object alive
        weakref.finalize(block, free.append, address).atexit = False
        return _shaped(block, like)

    def owns(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is in this memory."""
        return tensor.untyped_storage().data_ptr() in self.blocks

    def unowned(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, without keeping its block in use if that is in this memory."""
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        return tensor if block is None else _shaped(block, tensor)


class HostGraph(TorchDispatchMode):
    """A pass that computes without looking at numbers on the host; see `refusal`.

    ``refusal``: why the recorded pass cannot be replayed, None if it can.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusal: str | None = None
        self._arena = arena
        self._steps: list[Callable[[], object]] = []
        self._tape: Any = None  # the last step, if it consists of kernels
        self._kept: list[Tensor] = []  # kernels know only their addresses

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the pass of the context, which is computed as well."""
        with cpu_kernels.recorded_by(self._note_kernel), self:
            yield

    def replay(self) -> None:
        """Compute the recorded pass again."""
        assert self.refusal is None, self.refusal
        for step in self._steps:
            step()

    def release(self) -> None:
        """Forget the pass."""
        self._steps.clear()
        self._kept.clear()
        self._tape = None

    def result(self, tensor: Tensor) -> Tensor:
        """Return the output of the pass, valid until the next replay of a graph of this memory."""
        return self._arena.unowned(tensor)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Record an operation of torch and return its result in the memory of the graph."""
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        if operation in _EMPTY:
            return self._arena.empty(out)
        if operation.namespace not in ("aten", "mkldnn") or _READS_HOST & set(operation.tags):
            self.refusal = self.refusal or f"{operation} cannot be recorded"
            return out
        if operation.is_view or not _tensors(out):
            return out  # the same memory again, or a size
        if operation is torch.ops.aten.add.Tensor and not kwargs:
            total = _sum(self._arena, out, *args)
            if total is not None:
                return total
        args, kwargs = tree_map_only(Tensor, self._arena.unowned, (args, kwargs))
        self._tape = None
        if operation._schema.is_mutable:
            self._steps.append(lambda: operation(*args, **kwargs))
            return out
        made = tree_map_only(Tensor, self._arena.empty, out)
        targets = _tensors(tree_map_only(Tensor, self._arena.unowned, made))

        def step() -> None:
            for target, value in zip(targets, _tensors(operation(*args, **kwargs)), strict=True):
                target.copy_(value)

        for target, value in zip(targets, _tensors(out), strict=True):
            target.copy_(value)
        self._steps.append(step)
        return made

    def _note_kernel(self, call: cpu_kernels.Arguments, tensors: Sequence[Tensor | None]) -> None:
        if self._tape is None:
            self._tape = cpu_kernels.new_tape()
            self._steps.append(self._tape.replay)
        self._tape.add(*call)
        self._kept += [t for t in tensors if t is not None and not self._arena.owns(t)]


def _sum(arena: Arena, out: Tensor, a: Any, b: Any) -> Tensor | None:
    """Add by a kernel, with the same bits, if there is one."""
    whole = all(isinstance(x, Tensor) and x.shape == out.shape for x in (a, b))
    if not (whole and out.is_contiguous() and a.is_contiguous() and b.is_contiguous()):
        return None
    if not (cpu_kernels.take(a, b) and cpu_kernels.has("add", out.dtype)):
        return None
    total = arena.empty(out)
    cpu_kernels.run("add", [a, b, total], format=out.dtype, count=out.numel())
    return total


def _shaped(memory: Bytes, like: Tensor) -> Tensor:
    """Return a tensor in the form of ``like``, whose storage starts where ``memory`` does."""
    size = like.element_size()
    whole = torch.from_numpy(memory)  # keeps this array alive: a slice of it would not
    values = whole[: len(whole) // size * size].view(like.dtype)
    return values.as_strided(like.shape, like.stride(), like.storage_offset())


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in tree_leaves(found) if isinstance(x, Tensor)]
