"""Reads format ``torch_dist``: PyTorch's distributed files, ``common.pt``, ``metadata.json``.

Tensors of all layers lie stacked in one, with the layer as first dimension, unless the layers
differ.  What a distributed optimizer owns is a stretch of a flattened share: such a tensor of shape
[X, Y] in shares [x, y] was saved with shape [X/x, Y/y, x*y], and its real shape stands beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.foreign.archive import StoredArray, load_archive
from megatron.core.dist_checkpointing.foreign.dcp_index import Chunk, DcpIndex, DcpTensor
from megatron.core.dist_checkpointing.foreign.foreign_reader import (
    COMMON_FILE,
    ForeignPiece,
    ForeignReader,
    rng_state_of,
)
from megatron.core.dist_checkpointing.foreign.names import our_name, split_stack, split_state
from megatron.core.dist_checkpointing.manifest import CheckpointDamaged
from megatron.core.param_info import flat_boxes

_HALVES = {"_w": 0, "_v": 1}  # suffixes of the two halves of a gated layer, where saved apart


class TorchDistReader(ForeignReader):
    """A folder of format torch_dist."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        super().__init__(folder, verify=verify)
        self.values = load_archive(self._map(folder / COMMON_FILE))
        if not isinstance(self.values, dict):
            raise CheckpointDamaged(f"{folder / COMMON_FILE} is damaged: it holds no dictionary")
        self._index = DcpIndex(folder, self._map)
        for key, tensor in self._index.tensors.items():
            for name, piece in _pieces(key, tensor):
                self._add(name, tensor.dtype, piece)
        self._finish()

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        sizes = dict(self.manifest.layout.get("dense", ()))
        if not sizes:
            return None
        at = self._coordinate(rank)
        key = f"rng_state/shard_{at['pp']}.{at['tp']}_{sizes['pp']}.{sizes['tp']}"
        if key not in self._index.objects:
            return None
        (states,) = self._index.object(key)  # every object lies in a list
        return {"rng_state": rng_state_of(states[at["dp"] % len(states)])}


def _pieces(key: str, tensor: DcpTensor) -> Iterator[tuple[str, ForeignPiece]]:
    """The boxes of a stored tensor under our keys."""
    prefix, name = split_state(key)
    half = _HALVES.get(name[-2:])
    stack = split_stack(name if half is None else name[:-2])
    for chunk in tensor.chunks:
        for offset, shape, array in _boxes(tensor, chunk):
            if half:
                whole = tensor.unflattened or tensor.shape
                dim = 1 if stack else 0
                offset = (*offset[:dim], offset[dim] + whole[dim], *offset[dim + 1 :])
            if stack is None:
                plain = name if half is None else name[:-2]
                yield prefix + our_name(plain), ForeignPiece(offset, shape, array)
                continue
            for i in range(shape[0]):
                layer = our_name(f"{stack[0]}.{offset[0] + i}.{stack[1]}")
                of_layer = partial(_layer, array, i)
                yield prefix + layer, ForeignPiece(offset[1:], shape[1:], of_layer)


def _boxes(tensor: DcpTensor, chunk: Chunk) -> Iterator[tuple[Any, Any, Any]]:
    """Offset, shape and array of what a chunk holds of the real tensor."""
    if tensor.unflattened is None:
        yield chunk.offset, chunk.shape, chunk.array
        return
    share = tuple(n // cuts for n, cuts in zip(tensor.unflattened, tensor.shape, strict=False))
    first = tuple(i * n for i, n in zip(chunk.offset, share, strict=False))
    begin = chunk.offset[-1]
    done = 0
    for offset, shape in flat_boxes(share, begin, begin + chunk.shape[-1]):
        moved = tuple(map(sum, zip(first, offset, strict=True)))
        yield moved, shape, partial(_stretch, chunk.array, done, shape)
        done += prod(shape)


def _layer(array: Any, index: int) -> StoredArray:
    whole: StoredArray = array()
    return whole.select(index)


def _stretch(array: Any, begin: int, shape: tuple[int, ...]) -> StoredArray:
    whole: StoredArray = array()
    return whole.flat(begin, shape)
