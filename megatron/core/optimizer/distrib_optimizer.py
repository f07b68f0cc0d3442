"""The optimizer divided over replicas (ZeRO-1): each rank updates its share of every bucket.

Main parameters and the rule's state exist for the share alone.  The wrapper leaves the summed
gradients of the share in its buffers, and gathers the updated parameters (`start_param_sync`).

Collectives of a step: those of `MegatronOptimizer.step` with every sum taken over all ranks of an
optimizer instance (``intra_dist_opt``), since a replica holds only a part of each; then the
all-gathers of the wrapper, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.core.config.errors import ConfigError
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.mixed_precision import Part
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection


class DistributedOptimizer(MegatronOptimizer):
    """Updates this rank's share of the parameters of all model chunks."""

    is_sharded = True

    def __init__(
        self,
        config: OptimizerConfig,
        names: dict[nn.Parameter, str],
        param_groups: Sequence[dict[str, Any]],
        groups: ProcessGroupCollection,
        *,
        model_chunks: Sequence[nn.Module],
        grad_scaler: GradScaler | None = None,
        check_for_nan: bool = False,
    ) -> None:
        self.model_chunks = [_sharded(chunk) for chunk in model_chunks]
        inter = groups.inter_dist_opt
        super().__init__(
            config,
            names,
            param_groups,
            groups,
            parts={
                param: Part(start, stop, inter.rank(), inter.size())
                for chunk in self.model_chunks
                for param, start, stop in chunk.owned_parts()
            },
            grad_scaler=grad_scaler,
            check_for_nan=check_for_nan,
        )

    def _publish(self) -> None:
        super()._publish()
        for chunk in self.model_chunks:
            chunk.start_param_sync()


def _sharded(chunk: nn.Module) -> DistributedDataParallel:
    if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer:
        return chunk
    raise ConfigError(
        "--use-distributed-optimizer needs model chunks wrapped in DistributedDataParallel with "
        "DistributedDataParallelConfig(use_distributed_optimizer=True)"
    )
