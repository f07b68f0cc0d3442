"""Put tensors of several tensor-parallel ranks together, by what their records say."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.params.param_info import ParamInfo, info_of
from tests.support import tolerances

Shard = tuple[Tensor, ParamInfo]


def gradients(model: nn.Module) -> dict[str, Shard]:
    """Global name -> (this rank's gradient, its record)."""
    named = [(info_of(p), p) for p in model.parameters()]
    return {i.name: (torch.zeros_like(p) if p.grad is None else p.grad, i) for i, p in named}


def values(model: nn.Module) -> dict[str, Shard]:
    """Global name -> (this rank's values, its record)."""
    return {info_of(p).name: (p.detach(), info_of(p)) for p in model.parameters()}


def assemble(shards: list[Shard], *, are_gradients: bool) -> Tensor:
    """The global tensor.  Partial gradients are summed, copies must agree, padding is dropped."""
    info = shards[0][1]
    if are_gradients and info.counts_once_per_tp_group and info.sequence_parallel:
        return torch.stack([s for s, _ in shards]).sum(0)
    out = torch.full(info.global_shape, float("nan"), dtype=shards[0][0].dtype)
    for shard, info in shards:
        dim = info.shard_dim or 0
        for local, wide in info.slices(tuple(shard.shape)):
            target = out.narrow(dim, wide.start, wide.stop - wide.start)
            part = shard.narrow(dim, local.start, local.stop - local.start)
            if info.counts_once_per_tp_group and not target.isnan().any():
                torch.testing.assert_close(part, target, **tolerances.of(part.dtype))
            target.copy_(part)
    assert not out.isnan().any(), f"{info.name}: the ranks do not cover it"
    return out


def assemble_values(ranks: list[dict[str, Shard]]) -> dict[str, Tensor]:
    """Global parameters by name."""
    return {n: assemble([rank[n] for rank in ranks], are_gradients=False) for n in ranks[0]}


def assemble_gradients(ranks: list[dict[str, Shard]]) -> dict[str, Tensor]:
    """Global gradients by name."""
    return {n: assemble([rank[n] for rank in ranks], are_gradients=True) for n in ranks[0]}
