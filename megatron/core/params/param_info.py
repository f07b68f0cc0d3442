"""What a parameter is: its global name, its shape before sharding, and which part this rank holds.

Initialisation, checkpoints, the gradient norm and gradient finalisation read this one record;
nothing else rides on a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

_ATTRIBUTE = "_megatron_param_info"
# A norm that is part of the matrix behind it, and what it is called everywhere.
_NORM_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mixer.in_proj.layer_norm_": "norm.",
}


@dataclass(frozen=True)
class FlatPart:
    """What a data-parallel rank holds of a tensor-parallel share that is cut once more.

    The share has ``shape``; this rank holds its elements from ``start`` on, flattened row by row.
    ``num_copies`` ranks hold the same, this one is number ``copy`` among them.
    """

    shape: tuple[int, ...]
    start: int
    copy: int = 0
    num_copies: int = 1


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """``global_shape`` is the shape in one process without vocabulary padding.

    A parameter cut along ``shard_dim`` holds share ``shard_index`` of ``shard_count``.  That
    dimension may be made of several ``blocks`` of these relative sizes, (1, 1) for the gate and the
    up half of a gated MLP, each of which is cut alike: the local tensor is the shares of all
    blocks, one behind the other.  Rows beyond ``global_shape`` (vocabulary padding) belong to
    nobody: they stay zero.
    """

    global_shape: tuple[int, ...]
    name: str = ""  # layout-free, filled when the model is complete
    shard_dim: int | None = None  # None: every tensor-parallel rank holds all of it
    shard_index: int = 0
    shard_count: int = 1
    blocks: tuple[int, ...] = (1,)
    interleaved: tuple[int, ...] = ()  # so many rows of each of several matrices, in turn
    init: str = "zeros"  # a kind that param_init knows; "own": as its module has left it
    init_std: float = 0.0  # of a uniform one the bound
    is_expert: bool = False  # reduced over expert data parallelism
    sequence_parallel: bool = False  # gradient is partial on each tensor-parallel rank
    is_embedding_or_output: bool = False  # takes --decoupled-lr
    # The group (of `ProcessGroupCollection`) whose stages hold a copy each and sum its gradients;
    # embd: word embedding that the output layer uses too.
    shared_over: str | None = None
    travels_as_codes: bool = False  # fp8 ones, when replicas gather what they have updated
    is_duplicate: bool = False  # a copy of a parameter that another rank counts
    part: FlatPart | None = None  # None: this rank holds all of its tensor-parallel share
    dtype: torch.dtype | None = None  # that layers see, where the parameter is kept in another

    @property
    def is_shared_embedding(self) -> bool:
        """Whether it is a word embedding that the output layer uses too."""
        return self.shared_over == "embd"

    @property
    def counts_once_per_tp_group(self) -> bool:
        """Whether all tensor-parallel ranks hold the same values."""
        return self.shard_dim is None or self.shard_count == 1

    def slices(self, local_shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
        """Pairs (local, global) of slices along ``shard_dim``; rows of padding are left out."""
        dim = 0 if self.shard_dim is None else self.shard_dim
        if not local_shape:
            return
        local = 0
        for block in self.blocks:
            share = local_shape[dim] * block // sum(self.blocks)
            start = local * self.shard_count + self.shard_index * share
            stop = min(start + share, self.global_shape[dim])
            if stop > start:
                yield slice(local, local + stop - start), slice(start, stop)
            local += share

    def pieces(self, tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Pairs (offset in the whole, view of ``tensor``) that cover all but padding.

        ``tensor``: this rank's values of the parameter, or of something of its shape.
        """
        if self.part is None:
            yield from self._placed(tuple(tensor.shape), (0,) * tensor.dim(), tensor)
            return
        flat, done = tensor.view(-1), 0
        start = self.part.start
        for offset, box in flat_boxes(self.part.shape, start, start + flat.numel()):
            view = flat[done : done + prod(box)].view(box)
            done += prod(box)
            yield from self._placed(self.part.shape, offset, view)

    def _placed(
        self, share: tuple[int, ...], offset: tuple[int, ...], view: Tensor
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """``view``, a box at ``offset`` of the ``share``: one piece per block it touches."""
        if not share:
            yield (), view
            return
        dim = 0 if self.shard_dim is None else self.shard_dim
        begin, end = offset[dim], offset[dim] + view.shape[dim]
        for local, global_ in _joined(self.slices(share)):
            low, high = max(begin, local.start), min(end, local.stop)
            if low < high and view.numel():
                moved = list(offset)
                moved[dim] = global_.start + low - local.start
                yield tuple(moved), view.narrow(dim, low - begin, high - low)


def set_info(param: Tensor, info: ParamInfo) -> None:
    """Attach ``info`` to ``param``, replacing what was there."""
    setattr(param, _ATTRIBUTE, info)


def info_of(param: Tensor) -> ParamInfo:
    """The record of ``param``; a plain one for a parameter that nobody described."""
    info = param.__dict__.get(_ATTRIBUTE)
    return ParamInfo(global_shape=tuple(param.shape), init="own") if info is None else info


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that FSDP2 has cut (the same memory); others as they are."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def name_parameters(model: nn.Module, rename: dict[str, str] | None = None) -> None:
    """Write the name of each parameter and buffer, free of layouts and kernels, into its record.

    ``rename`` maps a local prefix to a global one (``decoder.layers.0.`` -> ``decoder.layers.4.``
    on a later pipeline stage).
    """
    for local_name, param in (*model.named_parameters(), *model.named_buffers()):
        name = local_name
        for local, global_ in (rename or {}).items():
            if name.startswith(local):
                name = global_ + name.removeprefix(local)
                break
        for inside, apart in _NORM_INSIDE.items():
            name = name.replace(inside, apart)
        set_info(param, replace(info_of(param), name=name))


def flat_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut flat elements [start, stop) of a row-major tensor into boxes (offset, extent), in order.

    >>> list(flat_boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row

    def part_of_row(
        r: int, begin: int, end: int
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for offset, box in flat_boxes(shape[1:], begin - r * row, end - r * row):
            yield (r, *offset), (1, *box)

    if first_whole > end_whole:  # begins and ends inside one row
        yield from part_of_row(end_whole, start, stop)
        return
    if start < first_whole * row:
        yield from part_of_row(first_whole - 1, start, first_whole * row)
    if first_whole < end_whole:
        offset = (first_whole, *(0 for _ in shape[1:]))
        yield offset, (end_whole - first_whole, *shape[1:])
    if stop > end_whole * row:
        yield from part_of_row(end_whole, end_whole * row, stop)


def _joined(slices: Iterable[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
    """Neighbours both here and in the whole tensor become one: blocks that nobody cuts."""
    held: tuple[slice, slice] | None = None
    for local, global_ in slices:
        if held and (held[0].stop, held[1].stop) == (local.start, global_.start):
            local, global_ = slice(held[0].start, local.stop), slice(held[1].start, global_.stop)
        elif held:
            yield held
        held = (local, global_)
    if held:
        yield held
