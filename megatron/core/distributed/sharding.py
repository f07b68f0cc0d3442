"""Derive from the flags what data-parallel ranks shard.

The functions accept the configuration or a namespace of arguments with the same names.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

Config = DistributedDataParallelConfig | Namespace


def is_fully_sharded(config: Config) -> bool:
    """Return whether parameters are sharded (`FullyShardedDataParallel`)."""
    by_strategy = config.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    return bool(config.use_torch_fsdp2 or (config.use_megatron_fsdp and by_strategy))


def reshards_after_forward(config: Config) -> bool:
    """Return whether FSDP frees gathered parameters between forward and backward."""
    if config.use_torch_fsdp2:
        return bool(config.torch_fsdp2_reshard_after_forward)
    return bool(config.data_parallel_sharding_strategy == "optim_grads_params")


def shares_instances(config: Config) -> bool:
    """Return whether instances of a sharded model (HSDP) divide the update of their common part."""
    is_asked = config.use_megatron_fsdp and config.enable_full_sharding_in_hsdp
    return bool(is_asked and is_fully_sharded(config) and num_instances(config) > 1)


def num_instances(config: Config) -> int:
    """Return the number of groups of ranks that each hold a complete optimizer state.

    1 if nothing is sharded.
    """
    is_sharded = config.use_distributed_optimizer or is_fully_sharded(config)
    return int(config.num_distributed_optimizer_instances) if is_sharded else 1


def share_of(numel: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return (start, stop) of the share of ``rank``.

    The shares have equal length, except that the last ones may be shorter or empty.

    >>> [share_of(7, rank, 3) for rank in range(3)]
    [(0, 3), (3, 6), (6, 7)]
    """
    width = -(-numel // num_ranks)
    return min(rank * width, numel), min((rank + 1) * width, numel)
