"""Distributed optimizer (ZeRO-1): each data-parallel rank updates its share of every bucket.

A rank holds main parameters and optimizer state for its share only.  The data-parallel wrapper
leaves the reduced gradients of the share in its buffers, and all-gathers the updated parameters
(`start_param_sync`).  With HSDP, where the model itself is sharded, instances may also divide the
update of the shard that they hold in common: then the share is a piece of the rank's shard, and all
ranks form one instance of the optimizer.

With --overlap-param-gather-with-optimizer-step the all-gather of a bucket starts as soon as the
bucket is updated, and overlaps with the update of the next one.

Collectives of a step: those of `MegatronOptimizer.step`, with every sum over all ranks of an
optimizer instance (``intra_dist_opt``), since each rank holds only a share of the gradients; then
the all-gathers of the wrapper, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import shares_instances
from megatron.core.optimizer.grad_scaler import GradScaler
from megatron.core.optimizer.mixed_precision import OptimizedParam, ShardRange, copy_main_to_model
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import ParamGroup
from megatron.core.parallel.process_groups_config import ProcessGroupCollection


class DistributedOptimizer(MegatronOptimizer):
    """Optimizer that updates this rank's share of the parameters of all model chunks."""

    is_sharded = True

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[nn.Module],
        param_groups: Sequence[ParamGroup],
        groups: ProcessGroupCollection,
        grad_scaler: GradScaler | None = None,
    ) -> None:
        self.model_chunks: list[DataParallelBase] = [_sharded(chunk) for chunk in model_chunks]
        copy = groups.inter_dist_opt.rank()
        num_copies = groups.inter_dist_opt.size()
        if any(shares_instances(chunk.ddp_config) for chunk in self.model_chunks):
            copy = 0
            num_copies = 1
            groups = ProcessGroupCollection(**{**vars(groups), "intra_dist_opt": groups.world})
        parts = {
            param: ShardRange(start, stop, copy, num_copies)
            for chunk in self.model_chunks
            for param, start, stop in chunk.owned_parts()
        }
        super().__init__(config, model_chunks, param_groups, groups, grad_scaler, parts)
        if not all(p.has_main for p in self.params if p.info.gathered_as_codes):
            for chunk in self.model_chunks:
                # These parameters are their own main parameters: the update reads their old
                # values, which the wrapper otherwise frees once it has the 8-bit codes.
                chunk.keep_values()

    @property
    def shard_fp32_from_float16_groups(self) -> list[list[nn.Parameter]]:
        """Main parameters of 16-bit parameters, by group; projects move them to the host."""
        apart = {p.main for p in self.params if p.has_main}
        return [[main for main in g["params"] if main in apart] for g in self.param_groups]

    def _update(self, divisor: float | Tensor, accepted: Tensor | None = None) -> None:
        self._prepare()
        if not self.config.overlap_param_gather_with_optimizer_step:
            super()._update(divisor, accepted)
            return
        self.rule.begin_step(accepted)
        with self._timed("optimizer-inner-step"):
            owned = {p.model: p for p in self.params}
            for chunk in self.model_chunks:
                assert isinstance(chunk, DistributedDataParallel), "FSDP has no buckets"
                for bucket in chunk.start_param_sync_by_bucket():
                    mine = [owned[param] for param in bucket.params if param in owned]
                    self._step(mine, divisor)
                    left = self.rule.weights
                    copy_main_to_model([p for p in mine if p.main in left and not p.host])

    def _publish_loaded(self) -> None:
        self._prepare()
        super()._publish_loaded()

    def _prepare(self) -> None:
        for chunk in self.model_chunks:
            chunk.prepare_param_update()

    def _publish(self, left: Sequence[OptimizedParam]) -> None:
        super()._publish(left)
        for chunk in self.model_chunks:
            chunk.start_param_sync(force_dispatch=True)


def _sharded(chunk: nn.Module) -> DataParallelBase:
    if isinstance(chunk, DataParallelBase) and chunk.ddp_config.use_distributed_optimizer:
        return chunk
    raise ConfigError(
        "--use-distributed-optimizer needs model chunks wrapped in DistributedDataParallel with "
        "DistributedDataParallelConfig(use_distributed_optimizer=True)"
    )
