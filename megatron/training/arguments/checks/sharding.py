"""Rules about parameters that are cut over the replicas."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig


def _flags(run: RunConfig) -> str:
    """What cuts the parameters."""
    if run.ddp.use_torch_fsdp2:
        return "--use-torch-fsdp2"
    return f"--data-parallel-sharding-strategy {run.ddp.data_parallel_sharding_strategy}"


def sharded_parameters_have_one_stage(run: RunConfig) -> Iterator[str]:
    """Gathering a layer for every micro-batch of a pipeline would cost more than it saves."""
    pp = run.model.pipeline_model_parallel_size
    if is_fully_sharded(run.ddp) and pp > 1:
        yield (
            f"{_flags(run)} with --pipeline-model-parallel-size {pp}: every stage would gather "
            "its layers for every micro-batch; set it to 1, or use --use-distributed-optimizer"
        )


def sharded_parameters_have_processes(run: RunConfig) -> Iterator[str]:
    """FSDP2 keeps state per process, and asks torch's own groups."""
    if is_fully_sharded(run.ddp) and run.distributed.virtual_ranks is not None:
        yield (
            f"{_flags(run)} needs one process per rank: use torchrun instead of --virtual-ranks "
            f"{run.distributed.virtual_ranks}, or --use-distributed-optimizer instead of FSDP"
        )


def one_way_to_shard(run: RunConfig) -> Iterator[str]:
    """FSDP2 cuts the optimizer with the parameters."""
    if not run.ddp.use_torch_fsdp2:
        return
    if run.ddp.use_megatron_fsdp:
        yield (
            "--use-torch-fsdp2 and --use-megatron-fsdp exclude each other: keep the first for "
            "full sharding, the second to choose it by --data-parallel-sharding-strategy"
        )
    if run.optimizer.use_distributed_optimizer:
        yield (
            "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other: keep the "
            "first to "
            "shard parameters, gradients and optimizer state, the second for optimizer state alone"
        )
