"""A world of one rank inside the test's own process, and a small model to train in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parallel.process_groups_config import (
    ProcessGroupCollection,
    create_process_groups,
    make_grids,
)


@dataclass(kw_only=True)
class ModelConfig(ModelParallelConfig):
    """What wrapper and schedule read of a model's configuration."""

    calculate_per_token_loss: bool = False
    fp32_residual_connection: bool = True
    gradient_accumulation_fusion: bool = True
    overlap_p2p_comm: bool = True


@pytest.fixture
def alone() -> Iterator[ProcessGroupCollection]:
    """The groups of a world of one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield create_process_groups(*make_grids(1))
    dist.destroy_process_group()


class TinyModel(nn.Module):
    """Embedding tied to the output, two hidden layers, a norm: [b, s] tokens -> [b, s, v]."""

    def __init__(self, seed: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = ModelConfig()
        self.embedding = nn.Embedding(13, 8)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 8)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.second(self.norm(F.gelu(self.first(hidden))))
        return F.linear(hidden, self.embedding.weight)


def token_batch(batch: int, seed: int = 3) -> Tensor:
    """[batch, 6 + 1] tokens: inputs and, one further, targets."""
    return torch.randint(13, (batch, 7), generator=torch.Generator().manual_seed(seed))


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean over all tokens of the batch."""
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
