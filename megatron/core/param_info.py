"""What a parameter is: its global name, its shape before sharding, and which part this rank holds.

Initialisation, checkpoints, the gradient norm and gradient finalisation read this one record;
nothing else rides on a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

_ATTRIBUTE = "_megatron_param_info"


@dataclass(frozen=True, kw_only=True)
class ParamInfo:
    """``global_shape`` is the shape in one process without vocabulary padding.

    A parameter cut along ``shard_dim`` holds share ``shard_index`` of ``shard_count``.  With
    ``num_blocks`` > 1 that dimension is made of equal blocks (the gate and the up half of a gated
    MLP), each of which is cut alike: the local tensor is the shares of all blocks, one behind the
    other.  Rows beyond ``global_shape`` (vocabulary padding) belong to nobody: they stay zero.
    """

    global_shape: tuple[int, ...]
    name: str = ""  # layout-free, filled when the model is complete
    shard_dim: int | None = None  # None: every tensor-parallel rank holds all of it
    shard_index: int = 0
    shard_count: int = 1
    num_blocks: int = 1
    init: str = "zeros"  # zeros, ones, normal, xavier_uniform
    init_std: float = 0.0
    is_expert: bool = False  # reduced over expert data parallelism
    sequence_parallel: bool = False  # gradient is partial on each tensor-parallel rank
    is_embedding_or_output: bool = False  # takes --decoupled-lr
    is_shared_embedding: bool = False  # word embedding that the output layer uses too
    is_duplicate: bool = False  # a copy of a parameter that another rank counts

    @property
    def counts_once_per_tp_group(self) -> bool:
        """Whether all tensor-parallel ranks hold the same values."""
        return self.shard_dim is None or self.shard_count == 1

    def slices(self, local_shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
        """Pairs (local, global) of slices along ``shard_dim``; rows of padding are left out."""
        dim = 0 if self.shard_dim is None else self.shard_dim
        if not local_shape:
            return
        share = local_shape[dim] // self.num_blocks
        block = share * self.shard_count
        for b in range(self.num_blocks):
            start = b * block + self.shard_index * share
            stop = min(start + share, self.global_shape[dim])
            if stop > start:
                yield slice(b * share, b * share + stop - start), slice(start, stop)


def set_info(param: nn.Parameter, info: ParamInfo) -> None:
    """Attach ``info`` to ``param``, replacing what was there."""
    setattr(param, _ATTRIBUTE, info)


def info_of(param: nn.Parameter) -> ParamInfo:
    """The record of ``param``; a plain one for a parameter that nobody described."""
    info = param.__dict__.get(_ATTRIBUTE)
    return info if info is not None else ParamInfo(global_shape=tuple(param.shape))


def name_parameters(model: nn.Module, rename: dict[str, str] | None = None) -> None:
    """Write each parameter's layout-free name into its record.

    ``rename`` maps a local prefix to a global one (``decoder.layers.0.`` -> ``decoder.layers.4.``
    on a later pipeline stage).
    """
    for local_name, param in model.named_parameters():
        name = local_name
        for local, global_ in (rename or {}).items():
            if name.startswith(local):
                name = global_ + name.removeprefix(local)
                break
        set_info(param, replace(info_of(param), name=name))
