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
            f"{_flags(run)} with --pipeline-model-parallel-size {pp}: layers would be gathered "
            "for every micro-batch of every stage; set it to 1, or use --use-distributed-optimizer"
        )


def sharded_parameters_have_processes(run: RunConfig) -> Iterator[str]:
    """FSDP2 keeps state per process, and asks torch's own groups."""
    if is_fully_sharded(run.ddp) and run.distributed.virtual_ranks is not None:
        yield (
            f"{_flags(run)} needs a process for each rank: drop --virtual-ranks "
            f"{run.distributed.virtual_ranks} and use torchrun"
        )


def one_way_to_shard(run: RunConfig) -> Iterator[str]:
    """FSDP2 cuts the optimizer with the parameters."""
    if not run.ddp.use_torch_fsdp2:
        return
    if run.ddp.use_megatron_fsdp:
        yield (
            "--use-torch-fsdp2 and --use-megatron-fsdp exclude each other: keep one; the second "
            "with --data-parallel-sharding-strategy optim_grads_params does what the first does"
        )
    if run.optimizer.use_distributed_optimizer:
        yield (
            "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other: the first cuts "
            "the optimizer too, keep one"
        )
