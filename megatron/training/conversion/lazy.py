"""Lazy tensors: computed one ahead of their use, split into entries, stacked from entries.

A stacked tensor ``name`` [E, ..] has one entry per expert of a layer: ``name.3`` is expert 3's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.safetensors_file import LazyTensor
from megatron.core.progress import Progress


def as_lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    """Return tensors in memory as lazy ones."""
    return {n: LazyTensor(n, t.dtype, tuple(t.shape), t.detach) for n, t in tensors.items()}


def zeros(name: str, shape: Sequence[int], dtype: torch.dtype) -> LazyTensor:
    """Return a tensor of zeros."""
    return LazyTensor(name, dtype, tuple(shape), partial(torch.zeros, shape, dtype=dtype))


def reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> LazyTensor:
    """Return a tensor with another shape."""
    return replace(tensor, shape=shape, make=lambda: tensor.make().reshape(shape))


def first_rows(tensor: LazyTensor, count: int) -> LazyTensor:
    """Return at most ``count`` rows of a tensor."""
    if tensor.shape[0] <= count:
        return tensor
    return replace(tensor, shape=(count, *tensor.shape[1:]), make=lambda: tensor.make()[:count])


def made_ahead(tensors: Sequence[LazyTensor]) -> list[LazyTensor]:
    """Return ``tensors`` such that a thread computes each while the previous one is in use.

    Make them in this order.  Two are in memory at a time.
    """
    thread = ThreadPoolExecutor(1, "tensor ahead")
    coming: dict[int, Future[Tensor]] = {}

    def take(index: int) -> Tensor:
        """Wait for tensor ``index`` and start to compute the next."""
        made = coming.pop(index, None) or thread.submit(tensors[index].make)
        tensor = made.result()
        if index + 1 < len(tensors):
            coming[index + 1] = thread.submit(tensors[index + 1].make)
        return tensor

    return [replace(tensor, make=partial(take, i)) for i, tensor in enumerate(tensors)]


def counted(tensors: Sequence[LazyTensor], progress: Progress) -> list[LazyTensor]:
    """Return ``tensors`` that add their GB to ``progress`` when they have been computed."""

    def make(tensor: LazyTensor) -> Tensor:
        made = tensor.make()
        progress.add(tensor.num_bytes / 1e9)
        return made

    return [replace(tensor, make=partial(make, tensor)) for tensor in tensors]


def unstacked(weights: Mapping[str, LazyTensor], ends: tuple[str, ...]) -> dict[str, LazyTensor]:
    """Split tensors whose names end with one of ``ends`` into one tensor per entry."""
    out: dict[str, LazyTensor] = {}
    for name, tensor in weights.items():
        if not name.endswith(ends) or not tensor.shape:
            out[name] = tensor
            continue
        for number in range(tensor.shape[0]):
            own = f"{name}.{number}"
            make = partial(_entry_of, tensor, number)
            out[own] = LazyTensor(own, tensor.dtype, tensor.shape[1:], make)
    return out


def _entry_of(tensor: LazyTensor, number: int) -> Tensor:
    return tensor.make()[number]


def stacked(tensors: Iterable[LazyTensor], ends: tuple[str, ...]) -> list[LazyTensor]:
    """Undo `unstacked`: stack ``name.0``, ``name.1``, .. into ``name``.

    Entries of a tensor must come in the order of their numbers.
    """
    parts: dict[str, list[LazyTensor]] = {}
    for tensor in tensors:
        name = tensor.name.rpartition(".")[0]
        name = name if name.endswith(ends) else tensor.name
        parts.setdefault(name, []).append(tensor)
    return [
        of_one[0]
        if of_one[0].name == name
        else replace(
            of_one[0],
            name=name,
            shape=(len(of_one), *of_one[0].shape),
            make=partial(_together, of_one),
        )
        for name, of_one in parts.items()
    ]


def _together(parts: list[LazyTensor]) -> Tensor:
    """Stack ``parts``, computed one at a time so that only one is in memory beside the result."""
    whole = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
    for place, part in zip(whole, parts, strict=True):
        place.copy_(part.make())
    return whole


def shared_parts(make: Callable[[], list[Tensor]], count: int) -> list[Callable[[], Tensor]]:
    """Return one function for each of the ``count`` tensors that one call of ``make`` returns.

    The results stay in memory until the last function is called: call them in order.
    """
    kept: list[Tensor] = []

    def take(index: int) -> Tensor:
        if not kept:
            kept.extend(make())
        part = kept[index]
        if index == count - 1:
            kept.clear()
        return part

    return [partial(take, index) for index in range(count)]
