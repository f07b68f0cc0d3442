"""Load balancing without an auxiliary loss: a bias on each expert's score, updated every step.

Source: arXiv 2408.15664.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter


@torch.no_grad()
def update_expert_biases(
    models: Sequence[nn.Module], groups: ProcessGroupCollection, rate: float
) -> None:
    """Raise the bias of experts with less than the mean load by ``rate``, lower that of the others.

    The load is the number of tokens of the global batch; the counts start again at 0.  Call it once
    per step.  Collective over tp_dp_cp.
    """
    routers = [m for model in models for m in model.modules() if isinstance(m, TopKRouter)]
    counts = [r.tokens_per_expert for r in routers if r.tokens_per_expert is not None]
    if not counts:
        return
    total = torch.stack(counts)
    if groups.tp_dp_cp.size() > 1:
        dist.all_reduce(total, group=groups.tp_dp_cp)
    steps = torch.sign(total.mean(-1, keepdim=True) - total) * rate
    for router, step in zip(routers, steps, strict=True):
        assert router.expert_bias is not None, "it comes with the counts"
        assert router.tokens_per_expert is not None, "it comes with the bias"
        router.expert_bias += step
        router.tokens_per_expert.zero_()
