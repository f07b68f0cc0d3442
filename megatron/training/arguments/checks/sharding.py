"""Checks of parameters that are sharded over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.distributed.sharding import is_fully_sharded
from megatron.training.config.run import RunConfig


def _flags(run: RunConfig) -> str:
    """Return the flag that shards the parameters."""
    if run.ddp.use_torch_fsdp2:
        return "--use-torch-fsdp2"
    return f"--data-parallel-sharding-strategy {run.ddp.data_parallel_sharding_strategy}"


def sharded_gradients_are_reduced_in_backward(run: RunConfig) -> Iterator[str]:
    """Refuse full sharding with weight gradients that are computed after the backward pass.

    FSDP2 reduces what autograd has accumulated by then, so these gradients would be missing.
    """
    schedule = run.model.pipeline_schedule or ""
    later = {
        f"--pipeline-schedule {schedule}": schedule.startswith("zb"),
        "--defer-embedding-wgrad-compute": run.model.defer_embedding_wgrad_compute,
    }
    for flag, is_given in later.items():
        if is_fully_sharded(run.ddp) and is_given:
            yield (
                f"{_flags(run)} reduces weight gradients in the backward pass, {flag} computes "
                "them after it: drop the second, or use --use-distributed-optimizer"
            )


def sharded_parameters_have_processes(run: RunConfig) -> Iterator[str]:
    """Refuse full sharding with --virtual-ranks.

    FSDP2 keeps its state per process, and uses the process groups of torch.distributed.
    """
    if is_fully_sharded(run.ddp) and run.distributed.virtual_ranks is not None:
        yield (
            f"{_flags(run)} needs one process per rank: use torchrun instead of --virtual-ranks "
            f"{run.distributed.virtual_ranks}, or --use-distributed-optimizer instead of FSDP"
        )


def one_way_to_shard(run: RunConfig) -> Iterator[str]:
    """Refuse FSDP2 with other sharding flags: it shards the optimizer state itself."""
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
