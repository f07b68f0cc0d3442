"""Record of a parameter: global name, shape before sharding, and the part that this rank holds.

Initialization, checkpoints, the gradient norm and gradient finalization read this record, which is
stored as an attribute of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from megatron.core.parallel.process_groups_config import get_installed

_ATTRIBUTE = "_megatron_param_info"
# Local name of a norm that is fused into the following linear layer -> its layout-independent name.
_NORM_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "mixer.in_proj.layer_norm_": "norm.",
}


@dataclass(frozen=True)
class FlatPart:
    """Part of a tensor-parallel shard that one data-parallel rank holds (ZeRO or FSDP).

    The shard has ``shape``; this rank holds its elements from ``start`` on, flattened row by row.
    ``num_copies`` ranks hold the same part; this rank has index ``copy`` among them.
    """

    shape: tuple[int, ...]
    start: int
    copy: int = 0
    num_copies: int = 1


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """Record of a parameter; ``global_shape`` is its shape in one process, without padding.

    A parameter that is sharded along ``shard_dim`` holds shard ``shard_index`` of ``shard_count``.
    That dimension may concatenate several ``blocks`` with these relative sizes, for example (1, 1)
    for gate and up projection of a gated MLP.  Each block is sharded separately, and the local
    tensor concatenates this rank's shards of all blocks.  Local rows beyond ``global_shape``
    (vocabulary padding) are zero.
    """

    global_shape: tuple[int, ...]
    name: str = ""  # independent of the layout; set by `name_parameters`
    shard_dim: int | None = None  # None: every tensor-parallel rank holds the complete parameter
    shard_index: int = 0
    shard_count: int = 1
    blocks: tuple[int, ...] = (1,)
    interleaved: tuple[int, ...] = ()  # rows that several matrices contribute in turn (q, k, v)
    # A kind of `param_init`; "own": the values that its module has set; a function fills the tensor
    # of ``global_shape`` from torch's generator.
    init: str | Callable[[Tensor], object] = "zeros"
    init_std: float = 0.0  # standard deviation; for init "uniform" the bound
    is_expert: bool = False  # reduced over expert data parallelism
    sequence_parallel: bool = False  # gradient is partial on each tensor-parallel rank
    is_embedding_or_output: bool = False  # its learning rate is --decoupled-lr
    # Name of the group (of `ProcessGroupCollection`) whose stages hold one copy each and sum their
    # gradients; embd: word embedding that the output layer uses too.
    shared_over: str | None = None
    gathered_as_codes: bool = False  # the distributed optimizer all-gathers it as fp8 codes
    is_duplicate: bool = False  # a copy of a parameter that another rank counts
    is_new: bool = False  # loaded models do not have it: it is trained with adapters
    part: FlatPart | None = None  # None: this rank holds its complete tensor-parallel shard
    dtype: torch.dtype | None = None  # dtype in which layers compute, if stored in another (FSDP)

    @property
    def is_shared_embedding(self) -> bool:
        """Whether the parameter is a word embedding that the output layer uses too."""
        return self.shared_over == "embd"

    @property
    def counts_once_per_tp_group(self) -> bool:
        """Whether all tensor-parallel ranks hold the same values."""
        return self.shard_dim is None or self.shard_count == 1

    def of_complete(self, shape: tuple[int, ...]) -> ParamInfo:
        """Return the record of a tensor of the same ranks that none of them shards."""
        part = self.part and replace(self.part, shape=shape, start=0)
        return ParamInfo(
            global_shape=shape,
            is_expert=self.is_expert,
            is_duplicate=self.is_duplicate,
            part=part,
        )

    def slices(self, local_shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
        """Yield pairs (local, global) of slices along ``shard_dim``, without padding."""
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
        """Yield pairs (offset in the global tensor, view of ``tensor``) that cover all but padding.

        ``tensor``: this rank's part of the parameter, or of a tensor of its shape, for example the
        gradient.
        """
        if self.part is None:
            yield from self._placed(tuple(tensor.shape), (0,) * tensor.dim(), tensor)
            return
        flat = tensor.view(-1)
        done = 0
        start = self.part.start
        for offset, box in flat_boxes(self.part.shape, start, start + flat.numel()):
            view = flat[done : done + prod(box)].view(box)
            done += prod(box)
            yield from self._placed(self.part.shape, offset, view)

    def _placed(
        self, share: tuple[int, ...], offset: tuple[int, ...], view: Tensor
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Split ``view``, a box at ``offset`` of a shard of shape ``share``, into its blocks."""
        if not share:
            yield (), view
            return
        dim = 0 if self.shard_dim is None else self.shard_dim
        begin = offset[dim]
        end = offset[dim] + view.shape[dim]
        for local, global_ in _joined(self.slices(share)):
            low = max(begin, local.start)
            high = min(end, local.stop)
            if low < high and view.numel():
                moved = list(offset)
                moved[dim] = global_.start + low - local.start
                yield tuple(moved), view.narrow(dim, low - begin, high - low)


def set_info(param: Tensor, info: ParamInfo) -> None:
    """Attach ``info`` to ``param``, replacing an existing record.

    Also set Megatron Core's attributes, which projects read.
    """
    attributes = param.__dict__
    attributes[_ATTRIBUTE] = info
    attributes["allreduce"] = not info.is_expert
    if info.sequence_parallel or "sequence_parallel" in attributes:
        attributes["sequence_parallel"] = info.sequence_parallel
    if info.shard_dim is not None:
        attributes |= {"tensor_model_parallel": True, "partition_dim": info.shard_dim}
        attributes.setdefault("partition_stride", 1)


def info_of(param: Tensor) -> ParamInfo:
    """Return the record of ``param``; without one, that of Megatron Core's attributes.

    A project may set the attributes ``sequence_parallel`` and ``allreduce`` of any parameter.
    """
    attributes = param.__dict__
    info: ParamInfo | None = attributes.get(_ATTRIBUTE)
    if info is None:
        info = _info_from_attributes(param)
    is_partial = bool(attributes.get("sequence_parallel", info.sequence_parallel))
    is_expert = not attributes.get("allreduce", not info.is_expert)
    if (is_partial, is_expert) != (info.sequence_parallel, info.is_expert):
        info = replace(info, sequence_parallel=is_partial, is_expert=is_expert)
    return info


def _info_from_attributes(param: Tensor) -> ParamInfo:
    attributes = param.__dict__
    shape = tuple(param.shape)
    groups = get_installed()
    if not attributes.get("tensor_model_parallel") or groups is None:
        return ParamInfo(global_shape=shape, init="own")
    tp = groups.tp if attributes.get("allreduce", True) else groups.expt_tp
    dim = attributes.get("partition_dim", -1) % len(shape)
    return ParamInfo(
        global_shape=(*shape[:dim], shape[dim] * tp.size(), *shape[dim + 1 :]),
        init="own",
        shard_dim=dim,
        shard_index=tp.rank(),
        shard_count=tp.size(),
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of an FSDP2 DTensor (a view); other tensors unchanged."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def name_parameters(
    model: nn.Module, rename: dict[str, str] | None = None, *, only_new: bool = False
) -> None:
    """Set the name in the record of each parameter and buffer of ``model``.

    Names do not depend on the layout or on fused layers.  ``rename`` maps a local prefix to a
    global one (``decoder.layers.0.`` -> ``decoder.layers.4.`` on a later pipeline stage).  A module
    whose local names depend on the layout has a method ``global_name``.  ``only_new``: not of
    parameters that have a name.
    """
    own_names = [
        (f"{path}." if path else "", module.global_name)
        for path, module in model.named_modules()
        if hasattr(type(module), "global_name")
    ]
    for local_name, param in (*model.named_parameters(), *model.named_buffers()):
        if only_new and info_of(param).name:
            continue
        name = local_name
        for path, global_name in own_names:
            if name.startswith(path):
                name = path + global_name(name.removeprefix(path))
        for local, global_ in (rename or {}).items():
            if name.startswith(local):
                name = global_ + name.removeprefix(local)
                break
        for inside, apart in _NORM_INSIDE.items():
            name = name.replace(inside, apart)
        set_info(param, replace(info_of(param), name=name))


def prefix_names(part: nn.Module, prefix: str) -> None:
    """Prepend ``prefix`` to the names in ``part``; call after `name_parameters` of the part."""
    for tensor in (*part.parameters(), *part.buffers()):
        info = info_of(tensor)
        set_info(tensor, replace(info, name=prefix + info.name))


def flat_boxes(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split elements [start, stop) of a flattened row-major tensor into boxes (offset, extent).

    >>> list(flat_boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not shape and start < stop:
        yield (), ()
        return
    lengths = [prod(shape[dim + 1 :]) for dim in range(len(shape))]  # of one index, in elements
    while start < stop:
        # The outermost dimension along which the rest begins with complete indices.
        dim = next(d for d, n in enumerate(lengths) if start % n == 0 and n <= stop - start)
        offset = tuple(start // n % size for n, size in zip(lengths, shape, strict=True))
        count = min((stop - start) // lengths[dim], shape[dim] - offset[dim])
        yield offset, (*(1 for _ in range(dim)), count, *shape[dim + 1 :])
        start += count * lengths[dim]


def _joined(slices: Iterable[tuple[slice, slice]]) -> Iterator[tuple[slice, slice]]:
    """Merge consecutive pairs that are adjacent both in the local and in the global tensor.

    This happens to blocks that are not sharded.
    """
    held: tuple[slice, slice] | None = None
    for local, global_ in slices:
        if held and (held[0].stop, held[1].stop) == (local.start, global_.start):
            local = slice(held[0].start, local.stop)
            global_ = slice(held[1].start, global_.stop)
        elif held:
            yield held
        held = (local, global_)
    if held:
        yield held
