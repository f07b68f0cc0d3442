"""Rules about parameters that are cut over the replicas."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.data_parallel_base import is_fully_sharded
from megatron.training.config.run import RunConfig


def sharded_parameters_have_one_stage(run: RunConfig) -> Iterator[str]:
    """Gathering a layer for every micro-batch of a pipeline would cost more than it saves."""
    pp = run.model.pipeline_model_parallel_size
    if is_fully_sharded(run.ddp) and pp > 1:
        yield (
            f"--use-torch-fsdp2 with --pipeline-model-parallel-size {pp}: layers would be gathered "
            "for every micro-batch of every stage; set it to 1, or use --use-distributed-optimizer"
        )


def one_way_to_shard_the_optimizer(run: RunConfig) -> Iterator[str]:
    """FSDP2 cuts the optimizer with the parameters."""
    if run.ddp.use_torch_fsdp2 and run.optimizer.use_distributed_optimizer:
        yield (
            "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other: the first cuts "
            "the optimizer too, keep one"
        )


def sharded_parameters_have_processes(run: RunConfig) -> Iterator[str]:
    """FSDP2 keeps state per process, and asks torch's own groups."""
    if is_fully_sharded(run.ddp) and run.distributed.virtual_ranks is not None:
        yield (
            f"--use-torch-fsdp2 needs a process for each rank: drop --virtual-ranks "
            f"{run.distributed.virtual_ranks} and use torchrun"
        )


CHECKS = (
    sharded_parameters_have_one_stage,
    sharded_parameters_have_processes,
    one_way_to_shard_the_optimizer,
)
